"""Ranks: the driver's handle on ranks that run in processes of their own."""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from signal import SIGKILL
from typing import Any

import psutil
import torch
import torch.distributed as dist
from IPython import get_ipython
from IPython.core.magic import no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from flex_model.distributed.processes import identity
from flex_model.notebook import rank_process, remote
from flex_model.notebook.cell_run import CellError, CellRun, Engine, Failure
from flex_model.notebook.rank_process import MemoryReport, RanksReport, Request
from flex_model.notebook.wire import MemoryFile, Packer, Reference, Unpacker
from flex_model.runs.interrupts import deferred

_JOIN_S = 300  # includes the import of torch on each rank
_KINDS = {"flex": remote.RemoteFlexModel, "mapping": remote.RemoteMapping, "other": remote.Remote}


class Ranks:
    """Ranks behind a notebook or a script, made by ``flex_model.notebook.launch``.

    Example::

        ranks = flex_model.notebook.launch(2)
        # a cell that begins with %%px runs on all ranks, as a torchrun script does
        ranks["activations"]["model.layers.3"]   # a record, from rank 0
        flex = ranks.wrap("model")               # a FlexModel, used from here
        ranks.close()

    ``ranks[name]`` is rank 0's variable of that name: numbers, text, tensors and containers of them
    come here, records are a table from which one is fetched when it is looked up, and models stay
    there. ``ranks[name] = value`` sets it on every rank.

    Attributes:
        client: The ipyparallel ``Client`` of the engines, which are not numbered as the ranks are.
    """

    def __init__(
        self,
        client: Any,
        processes: Any,
        grace_s: float,
        device: str | None,
        master_addr: str | None,
    ) -> None:
        self.client, self._processes = client, processes
        self._grace_s, self._device, self._master_addr = grace_s, device, master_addr
        self._engines: list[Engine] = []
        # Also when the session ends, or this object is not used any more.
        self._closing = weakref.finalize(
            self, client.close if processes is None else processes.close
        )
        self._join()
        _register_magics(self)

    # ---- The world -------------------------------------------------------------------------------

    def _join(self) -> None:
        """Number the engines and make them one world. The store is here, so it outlives ranks."""
        ids = sorted(self.client.ids)
        probe, here = MemoryFile(1, []), identity()[0]
        try:
            folders = [folder for folder in sys.path if folder]
            view = self.client[ids]
            code = f"import sys; sys.path += [x for x in {folders!r} if x not in sys.path]"
            view.execute(code, block=False).get(_JOIN_S)  # as the imports of this process
            found = view.apply_async(rank_process.introduce, here, probe.address).get(_JOIN_S)
        finally:
            probe.close()
        self._engines = [
            Engine(
                rank,
                id,
                about["host"],
                about["pid"],
                self.client,
                psutil.Process(about["pid"]) if about["identity"][0] == here else None,
            )
            for rank, (id, about) in enumerate(zip(ids, found))
        ]
        self._numbers = weakref.WeakKeyDictionary[Any, int]()  # of objects that both sides have
        # Hashes of their attributes as the ranks have them, and those that hooks of ranks are of.
        self._sent = weakref.WeakKeyDictionary[Any, dict[str, bytes]]()
        self._in_use: list[Any] = []
        self._dropped: list[Reference] = []
        self._num_requests = self._num_shared = 0
        hosts = [about["identity"][0] for about in found]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        is_local = set(hosts) == {here}
        address = "127.0.0.1" if is_local else socket.getfqdn()
        shared = {
            "WORLD_SIZE": str(len(ids)),
            "MASTER_ADDR": self._master_addr or address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks don't make one
        }
        devices = [self._device or ("cuda" if about["num_gpus"] else "cpu") for about in found]
        self._shares_memory = all(about["shares_memory"] for about in found)
        results = []
        for rank, (id, about) in enumerate(zip(ids, found)):
            on_host = [i for i, host in enumerate(hosts) if host == hosts[rank]]
            if devices[rank] == "cuda" and len(on_host) > about["num_gpus"]:
                raise ValueError(
                    f"launch: {len(on_host)} ranks on {about['host']}, which has "
                    f"{about['num_gpus']} GPUs; start one rank for each, or pass device='cpu'"
                )
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(on_host.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(on_host)),
            }
            arguments = (shared | own, devices[rank], self._shares_memory)
            results.append(self.client[id].apply_async(rank_process.join, *arguments))
        for result in results:
            result.get(timeout=_JOIN_S)

    def restart(self) -> None:
        """End all ranks, by their process ids, and start as many afresh. Their models, variables
        and process groups are lost; load them again.
        """
        if self._processes is None:
            raise RuntimeError(
                "restart: these engines were not started by launch(); restart them where they were "
                "started, and call launch(cluster=...) again"
            )
        for engine in self._engines:
            engine.signal(SIGKILL)
        self._processes.restart()
        self._join()
        print(f"{len(self)} ranks started afresh: models and variables of the old ones are lost")

    def close(self) -> None:
        """End the ranks and all processes that were started for them. Repeated calls do nothing.

        Engines of a cluster that was passed to ``launch`` keep running.
        """
        self._closing()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._engines)

    def __repr__(self) -> str:
        alive = [engine.rank for engine in self._engines if engine.is_alive]
        hosts = ", ".join(dict.fromkeys(engine.host for engine in self._engines))
        ended = "" if len(alive) == len(self) else f", of which {len(self) - len(alive)} ended"
        return f"<{len(self)} ranks on {hosts}{ended}>"

    # ---- Running ---------------------------------------------------------------------------------

    def run(self, work: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, or the code of a cell, on every rank; return rank 0's result.

        Example::

            model = ranks.run(load, "folder")         # def load(path): ...
            ranks.run("tokens = torch.arange(24).reshape(2, 12)")

        Collective: every rank runs it. Models and other objects that can't travel stay on the
        ranks, and what is returned stands for them. A function defined in a notebook or script does
        not see the variables of cells; pass what it needs.

        Raises:
            CellError: it failed on some rank. All ranks have ended it then.
            KeyboardInterrupt: Ctrl-C; so have they.
        """
        if isinstance(work, str):
            self.run_cell(work)
            return None
        return self.request(rank_process.call, work, args, kwargs)

    @deferred()  # Ctrl-C while it is sent would leave some ranks without it
    def run_cell(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run code in the ranks' namespace and show what they print: what ``%%px`` does."""
        engines = self._alive(self._engines if ranks is None else [self._engines[i] for i in ranks])
        parts = [
            self.client[engine.id].execute(code, silent=False, block=False) for engine in engines
        ]
        CellRun(parts, engines, self._grace_s).wait()

    @deferred()
    def request(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` of the ranks, rank 0's result. What can't travel stays there,
        and a `Remote` stands for it.
        """
        engines = self._alive(self._engines)
        self._num_requests += 1
        shared: dict[Reference, Any] = {
            ("shared", number): value
            for value, number in self._numbers.items()
            if value in self._sent
        }

        def refer(value: Any) -> Reference | None:
            if isinstance(value, remote.Remote):
                return vars(value)["_reference"]
            if not isinstance(value, rank_process.SHARED):
                return None
            reference = ("shared", self._number_of(value))
            shared[reference] = value
            return reference

        packer = Packer(refer)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        request = Request(self._num_requests, (function, args), modes, autocasts)
        pickled = packer.pickle(request)
        self._update(engines, shared, refer)
        dropped, self._dropped = self._dropped, []
        self._in_use = [*shared.values()]
        answer, registered = self._send(engines, "answer", packer, pickled, dropped)
        self._in_use = [shared[reference] for reference in registered if reference in shared]
        return Unpacker(answer[1], self._object_of).unpickle(answer[0])

    def _update(
        self,
        engines: Sequence[Engine],
        shared: dict[Reference, Any],
        refer: Callable[[Any], Reference | None],
    ) -> None:
        """Have the ranks' hooks and edits be as they are here. Values are compared, not identities:
        variables and tensors that an editing function reads change without it. What is sent is
        noted once all ranks have it, before the request runs, which may fail.

        Raises:
            ValueError: an attribute that can't be set while the hook is registered.
        """
        states: dict[Reference, dict[str, Any]] = {}
        changed: dict[Reference, dict[str, bytes]] = {}
        while left := [reference for reference in shared if reference not in states]:
            for reference in left:
                states[reference] = shared[reference].__reduce_ex__(2)[2]  # as a copy has them
                digests = {n: Packer(refer).digest(x) for n, x in states[reference].items()}
                before = self._sent.get(shared[reference], {})
                if new := dict(digests.items() - before.items()):
                    changed[reference] = new
        if not changed:
            return
        packer = Packer(refer)
        kinds = packer.pickle({reference: type(shared[reference]) for reference in changed})
        news = packer.pickle({r: {n: states[r][n] for n in new} for r, new in changed.items()})
        sent = {r: self._sent[shared[r]] for r in changed if shared[r] in self._sent}
        for r in sent:  # until all ranks have taken it, what they have is not known
            self._sent[shared[r]] = {n: x for n, x in sent[r].items() if n not in changed[r]}
        refused = self._send(engines, "update", packer, kinds, news)
        for r, new in changed.items():
            taken = {n: digest for n, digest in new.items() if (r, n) not in refused}
            self._sent[shared[r]] = sent.get(r, {}) | taken
        for error in refused.values():
            raise ValueError(f"{error}. Before that set it here as it was: each call sends it")

    def _send(self, engines: Sequence[Engine], method: str, packer: Packer, *pickled: Any) -> Any:
        """Return what rank 0's process makes of what the packer has pickled."""
        payload = packer.payload(self._shares_memory)
        file = payload if isinstance(payload, MemoryFile) else None
        try:
            arguments = (method, *pickled, file.address if file else payload)
            return self._call(engines, rank_process.handle, *arguments)[0]
        finally:
            if file is not None:
                file.close()

    def _alive(self, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Return the engines; a CellError if a process of theirs has ended."""
        ended = [engine.rank for engine in engines if not engine.is_alive]
        if ended:
            why = Failure("EndedError", "its process has ended", "", ended)
            raise CellError([why], ended)
        return engines

    def _number_of(self, value: Any) -> int:
        """Return the number that identifies a hook or an edit on both sides."""
        if value not in self._numbers:
            self._num_shared += 1
            self._numbers[value] = self._num_shared
            self._forget(value, ("shared", self._num_shared))
        return self._numbers[value]

    def _forget(self, value: Any, reference: Reference) -> None:
        """Have the ranks drop what the reference stands for, once the object is not used here."""
        weakref.finalize(value, self._dropped.append, reference).atexit = False

    def _object_of(self, reference: Reference) -> Any:
        if reference[0] == "shared":
            return next(v for v, number in self._numbers.items() if number == reference[1])
        _, held, kind, about = reference
        value = _KINDS[kind](self, held, about)
        self._forget(value, held)
        return value

    # ---- What is on the ranks --------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.request(rank_process.read, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.request(rank_process.assign, name, value)

    def wrap(self, model: str | remote.Remote, **settings: Any) -> remote.RemoteFlexModel:
        """Make a FlexModel on every rank, and return a handle of it. Collective.

        Example::

            flex = ranks.wrap("model")
            flex.register_forward_hook(HookFunction("model.layers.1.mlp"))
            flex(tokens)
            flex.output_ptr["model.layers.1.mlp"][0]

        Args:
            model: The name of a variable of the cells, or what ``ranks.run`` returned.
            settings: Further arguments of FlexModel.
        """
        return self.request(rank_process.wrap, model, settings)

    def memory(self) -> MemoryReport:
        """Return the memory of each rank's process and device. Prints as a table."""
        return MemoryReport(self._each(rank_process.memory))

    def doctor(self) -> RanksReport:
        """Compare the ranks' hosts, devices and versions, and try a collective. Collective."""
        return RanksReport(self._each(rank_process.examine))

    def _each(self, function: Callable[[], Any]) -> list[Any]:
        """Return ``function()`` of each rank."""
        return self._call(self._alive(self._engines), function)

    @deferred()
    def _call(self, engines: Sequence[Engine], function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` of each engine."""
        parts = [self.client[engine.id].apply_async(function, *args) for engine in engines]
        return CellRun(parts, engines, self._grace_s).wait()


# ---- Magics --------------------------------------------------------------------------------------


def _register_magics(ranks: Ranks) -> None:
    """Have ``%px`` and ``%%px`` of this IPython session, if there is one, run on these ranks, in
    place of ipyparallel's of the same name.
    """

    @no_var_expand
    @magic_arguments()
    @argument("-t", "--targets", help="the ranks that run it, as 0 or 0,2 (default: all)")
    def px(line: str, cell: str | None = None) -> None:
        """Run the cell, or the rest of the line, on all ranks."""
        if cell is None:
            ranks.run_cell(line)
            return
        chosen = parse_argstring(px, line).targets
        ranks.run_cell(cell, None if chosen is None else [*map(int, chosen.split(","))])

    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(px, "line_cell")
