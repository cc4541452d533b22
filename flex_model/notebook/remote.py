"""Objects of the driver that stand for objects of the ranks."""

from __future__ import annotations

import contextlib
import html as markup
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from flex_model.diagnostics.timeline import Timeline
from flex_model.inspection import text
from flex_model.notebook import rank_process
from flex_model.notebook.wire import Reference
from flex_model.visualize.html import page
from flex_model.visualize.model_map import model_map

if TYPE_CHECKING:
    from flex_model.notebook.driver import Ranks


class Remote:
    """An object that is on every rank. Attributes, calls and items are those of the ranks: every
    rank does the same, and rank 0's result comes back.
    """

    def __init__(self, ranks: Ranks, reference: Reference, about: str) -> None:
        vars(self).update(_ranks=ranks, _reference=reference, _about=about)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # IPython and copy look for such
            raise AttributeError(name)
        return self._ranks.request(rank_process.read_attribute, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ranks.request(setattr, self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ranks.request(rank_process.call, self, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._ranks.request(rank_process.read_item, self, key)

    def __enter__(self) -> Any:
        return self._ranks.request(_enter, self)

    def __exit__(self, kind: type[BaseException] | None, *exc_info: Any) -> None:
        self._ranks.request(_exit, self, None if kind is None else kind.__name__)

    def __repr__(self) -> str:
        return f"<{self._about}, on {len(self._ranks)} ranks>"


class RemoteMapping(text.Printed, Remote, Mapping):
    """Records of rank 0, or other named values there. It prints as a table of names, shapes and
    dtypes; a value travels when it is looked up.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except (KeyError, AttributeError):
            return super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        found = self._ranks.request(rank_process.find_item, self, key)
        if found is None:
            raise KeyError(key)
        return found[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self._rows()])

    def __len__(self) -> int:
        return len(self._rows())

    def _rows(self) -> list[tuple[Any, list[tuple[str, str]]]]:
        return self._ranks.request(rank_process.rows_of, self)

    def _cells(self) -> list[list[str]]:
        rows = []
        for name, tensors in self._rows():
            shapes, dtypes = zip(*tensors) if tensors else ((), ())
            unique = [list(dict.fromkeys(texts)) for texts in (shapes, dtypes)]
            cells = [", ".join(texts[:4]) + ", ..." * (len(texts) > 4) for texts in unique]
            rows.append([str(name), *cells, str(len(tensors))])
        return rows

    def _blocks(self) -> Iterator[text.Table | str]:
        yield text.Table(_HEADERS, self._cells())

    __repr__ = text.Printed.__str__


_HEADERS = ("name", "shape", "dtype", "tensors")


class RemoteFlexModel(Remote):
    """A FlexModel of the ranks, used from the driver as if it were here.

    Example::

        flex = ranks.wrap("model")
        flex.register_forward_hook(HookFunction("layers.3.mlp", editing_function=halve))
        with torch.no_grad():
            logits = flex(tokens).logits
        flex.output_ptr["layers.3.mlp"][0]

    Editing functions are sent to the ranks and run there: what they keep goes into ``save_ctx``.
    Results come from rank 0, detached, on the CPU. ``flex.run(function, ...)`` calls ``function``
    on every rank with the FlexModel as its first argument.
    """

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(flex, *args, **kwargs)``, called on every rank, of rank 0.

        Example::

            found = flex.run(editing.activation_patching, clean, corrupted, sites, metric)
            logits = flex.run(lens.take)
        """
        return self._ranks.run(function, self, *args, **kwargs)

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record a timeline as ``FlexModel.timeline`` does."""
        timeline = Timeline()
        recording = self._ranks.request(rank_process.read_attribute, self, "timeline")()
        recorded = self._ranks.request(_enter_and_keep, recording)
        try:
            yield timeline
        finally:
            recording.__exit__(None)
        found = self._ranks.request(_value, recorded)
        timeline.fill(list(found), found.ranks, found.num_forgotten)

    def show(self, *args: Any, html: str | None = None, show_all: bool = False) -> None:
        """Do as ``FlexModel.show`` does; in a notebook the page appears below the cell."""
        plain, page = self._ranks.request(_picture, self, args, show_all)
        if html is None:
            display(Page(plain, page))
        else:
            Path(html).write_text(page, "utf-8")


class Page:
    """A page of its own, in a frame of the notebook; elsewhere its text."""

    def __init__(self, plain: str, page: str) -> None:
        self.plain, self.page = plain, page

    def __repr__(self) -> str:
        return self.plain

    def _repr_html_(self) -> str:
        source = markup.escape(self.page, quote=True)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts" '
            'style="width: 100%; height: 600px; border: 1px solid #ccc"></iframe>'
        )


# ---- What these call on the ranks ----------------------------------------------------------------


def _enter(context: Any) -> Any:
    return rank_process.reveal(context.__enter__())


def _enter_and_keep(context: Any) -> Any:
    return rank_process.Kept(context.__enter__())


def _value(value: Any) -> Any:
    return value


def _exit(context: Any, error: str | None) -> None:
    failure = None if error is None else RuntimeError(f"the driver raised {error}")
    context.__exit__(None if failure is None else RuntimeError, failure, None)


def _picture(flex: Any, args: tuple[Any, ...], show_all: bool) -> tuple[str, str]:
    modules = flex._runner.modules_to_show(args)
    picture = model_map(flex._core, flex._dict_records, modules, flex._timeline)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        picture.print(show_all)
    return printed.getvalue().rstrip(), page(picture)
