"""``python -m flex_model harvest``, and the example."""

import copy
import json
from unittest import mock

import pytest
import torch
from families import llama

import quantized_folders
from flex_model import HookError, cli
from flex_model.sequential import ActivationStore, harvest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LINES = ["one two three", "", "two", "four one two one", "   ", "three three", "one"]

SITES = ("model.layers.0", "model.layers.1.mlp", "model.layers.2")


@pytest.fixture
def folder(tmp_path):
    """A model and a tokenizer, as save_pretrained writes them."""
    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "one", "two", "three", "four"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(tmp_path / "model")
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    return tmp_path


def arguments(folder, *more):
    given = ["harvest", str(folder / "model"), "--data", str(folder / "lines.txt")]
    return [*given, "--out", str(folder / "out"), "--quiet", "--batch-size", "2", *more]


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_activations_equal_those_of_the_whole_model(folder, kind, capsys):
    modules = ["model.layers.1.mlp", r"re:model\.layers\.[02]$"]
    if kind:
        quantized_folders.DEQUANTISED[kind](folder / "model")
        model = quantized_folders.from_pretrained(folder / "model")
    else:
        model = llama()  # not `from_pretrained`, which leaves weights where they lie in the file
    assert cli.main(arguments(folder, "--window", "2", "--modules", *modules)) == 0
    shown = capsys.readouterr()
    assert f"3 batches of {', '.join(SITES)}" in shown.out
    assert "6 loads of 3 targets" in shown.err
    store = ActivationStore(folder / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    lines = [line for line in LINES if line.strip()]
    found = {}
    for name in SITES:
        model.get_submodule(name).register_forward_hook(
            lambda m, a, output, name=name: found.update({name: output})
        )
    for index in range(3):
        batch = tokenizer(lines[2 * index : 2 * index + 2], return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        with torch.no_grad():
            model(**batch, use_cache=False)
        for name, expected in found.items():
            assert torch.equal(store.batch(index)[name][0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_from_pretrained_keeps_in_float32(folder, dtype):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    made = transformers.T5EncoderModel(transformers.T5Config(vocab_size=64, **sizes))
    made.save_pretrained(folder / "model")
    model = transformers.T5EncoderModel.from_pretrained(folder / "model", dtype=dtype)
    name = "encoder.block.1"
    expected = []
    model.get_submodule(name).register_forward_hook(lambda m, a, out: expected.append(out[0]))
    given = arguments(folder, "--modules", name, "--dtype", str(dtype).partition(".")[2])
    assert cli.main([*given, "--batch-size", "9"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    lines = [line for line in LINES if line.strip()]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    with torch.no_grad():
        copy.deepcopy(model)(batch["input_ids"], batch["attention_mask"])
    (found,) = ActivationStore(folder / "out").tensors(name)
    assert torch.equal(found, expected[0])
    assert found.dtype == (torch.float32 if dtype == torch.float16 else dtype)


def test_a_tokenizer_without_a_token_for_padding(folder):
    given = arguments(folder, "--modules", "model.norm")
    assert cli.main(given) == 0
    expected = list(ActivationStore(folder / "out").tensors("model.norm"))
    settings = folder / "model" / "tokenizer_config.json"
    told = json.loads(settings.read_text())
    assert told.pop("pad_token") == "<pad>"  # whose number is 0
    settings.write_text(json.dumps(told))
    assert transformers.AutoTokenizer.from_pretrained(folder / "model").pad_token is None
    assert cli.main([*given, "--out", str(folder / "again")]) == 0
    found = list(ActivationStore(folder / "again").tensors("model.norm"))
    assert all(map(torch.equal, found, expected)) and len(found) == 3


def test_the_same_command_again_reads_nothing(folder, capsys):
    command = arguments(folder, "--modules", "model.norm", "--inputs", "--dtype", "bfloat16")
    assert cli.main(command) == 0
    assert next(ActivationStore(folder / "out").tensors("model.norm")).dtype == torch.bfloat16
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "0 loads of 0 targets" in capsys.readouterr().err
    assert cli.main([*command, "--max-length", "9"]) == 1
    assert "records with key" in capsys.readouterr().err


def test_other_weights_of_the_same_size_do_not_continue_a_store(folder, capsys):
    given = arguments(folder, "--modules", "model.layers.1.mlp")
    assert cli.main(given) == 0
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(folder / "model")
    capsys.readouterr()
    assert cli.main(given) == 1
    assert "records with key" in capsys.readouterr().err


@pytest.mark.parametrize("positions, given, length, cut", [(64, "2", 2, 2), (3, "512", 3, 1)])
def test_lines_that_are_cut_are_counted(folder, positions, given, length, cut):
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    config.update({"max_position_embeddings": positions})
    config.save_pretrained(folder / "model")
    with pytest.warns(UserWarning, match=f"{cut} of 5 lines were cut at {length} tokens"):
        cli.main(arguments(folder, "--modules", "model.norm", "--max-length", given))
    found = list(ActivationStore(folder / "out").tensors("model.norm"))
    assert max(tensor.shape[1] for tensor in found) == length


def test_what_was_written_as_json(folder, capsys):
    assert cli.main(arguments(folder, "--modules", "model.norm", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("bytes_read") > 0 and told.pop("num_loads") == told.pop("num_targets") > 0
    assert told == {"out": str(folder / "out"), "modules": ["model.norm"], "num_batches": 3}


def test_what_is_wrong_is_said(folder, capsys):
    assert cli.main(arguments(folder, "--modules", "model.layer.1")) == 1
    assert "matches no module of LlamaForCausalLM; nearest names" in capsys.readouterr().err
    assert not (folder / "out").exists()
    assert cli.main(arguments(folder, "--modules", "model.layers")) == 1
    assert r"members: 're:model.layers\.[^.]+$'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(arguments(folder, "--modules", "lm_head", "--dtype", "float8_e4m3fn"))
    assert "one of bfloat16, float16, float32, float64, got" in capsys.readouterr().err
    with mock.patch.object(harvest, "run", side_effect=HookError("No space left")):
        assert cli.main(arguments(folder, "--modules", "lm_head")) == 1
    assert "No space left" in capsys.readouterr().err
    config = transformers.ViTConfig(architectures=["ViTModel"])
    config.save_pretrained(folder / "images")
    of_images = [one.replace("/model", "/images") for one in arguments(folder, "--modules", "x")]
    assert cli.main(of_images) == 1
    assert "ViTModel reads pixel_values, and not the tokens of" in capsys.readouterr().err
    (folder / "lines.txt").write_text("\n \n")
    assert cli.main(arguments(folder, "--modules", "model.norm")) == 1
    assert "no line with text" in capsys.readouterr().err
    (folder / "model" / "config.json").unlink()
    assert cli.main(arguments(folder, "--modules", "model.norm")) == 1
    assert "no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(arguments(folder, "--modules", "model.norm", "--window", "0"))
