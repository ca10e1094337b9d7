"""The thread that runs the generation engine for the requests of an event loop."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.generate import check_finite
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.slot_batch import StepGraphs
from tunekit.serving.adapter_set import AdapterSet
from tunekit.serving.errors import APIError

logger = logging.getLogger(__name__)
Output = TokenOutput | Exception


@dataclass(frozen=True)
class QueuedRequest:
    """A request for an adapter (None: the base model), and the queue that receives its tokens."""

    request: GenerationRequest
    adapter: str | None
    outputs: "asyncio.Queue[Output]"

    @property
    def request_id(self) -> str:
        return self.request.request_id


class StepErrors:
    """Context manager for a step of the engine: after an exception its requests fail, and the server continues."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.fail = fail

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        logger.error("the engine failed", exc_info=error)
        self.fail(f"the engine failed: {error if isinstance(error, UserError) else type(error).__name__}")
        return True


class EngineThread:
    """Runs the engine while requests are unfinished. All methods may be called from the thread of the event loop.

    The engine runs with one adapter at a time. Requests for it that wait when it becomes active are answered
    first; later ones only if no request for another adapter waits, so that each adapter has its turn.
    """

    def __init__(self, engine: GenerationEngine, adapters: AdapterSet) -> None:
        self.engine, self.adapters = engine, adapters
        self.condition = threading.Condition()
        self.arrived: list[QueuedRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Callable[[], None], Future[None]]] = []
        self.is_stopping = False
        # Used by the thread only.
        self.waiting: deque[QueuedRequest] = deque()
        self.turn: set[str] = set()  # requests that waited when the adapter became active
        self.running: dict[str, QueuedRequest] = {}
        self.graphs: dict[str | None, StepGraphs] = {}  # of adapters that are not active
        self.step_errors = StepErrors(self.fail_running)
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def submit(self, requests: Iterable[QueuedRequest]) -> None:
        """Queue requests. Raises APIError if the thread has ended."""
        with self.condition:
            self.check_running()
            self.arrived += requests
            self.condition.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests whose answers are not needed any more. Finished ones are ignored."""
        with self.condition:
            self.aborted += request_ids
            self.condition.notify()

    def check_running(self) -> None:
        if self.is_stopping:
            raise APIError(503, "the engine has stopped", code="service_unavailable")

    def load_adapter(self, name: str, path: str) -> Future[None]:
        """Load an adapter between two steps."""
        return self.call(lambda: self.adapters.load(name, path))

    def unload_adapter(self, name: str) -> Future[None]:
        """Remove an adapter between two steps. Fails with APIError if requests for it are unfinished."""

        def unload() -> None:
            if any(item.adapter == name for item in (*self.running.values(), *self.waiting)):
                raise APIError(409, f"the adapter {name!r} answers requests; retry later", "lora_name", "conflict")
            if self.adapters.active == name:
                self.switch(None)
            self.graphs.pop(name, None)
            self.adapters.remove(name)

        return self.call(unload)

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the thread, between two steps. Raises APIError if the thread has ended."""
        future: Future[None] = Future()
        with self.condition:
            self.check_running()
            self.calls.append((function, future))
            self.condition.notify()
        return future

    def stop(self) -> None:
        """End the thread. Unfinished requests are dropped."""
        with self.condition:
            self.is_stopping = True
            self.condition.notify()
        self.thread.join()

    # Thread

    def run(self) -> None:
        try:
            while self.receive():
                with self.step_errors:
                    self.admit()
                    outputs = self.engine.step() if self.running else []
                    for output in outputs:
                        check_finite(output)
                    self.send(outputs)
        finally:  # no client may wait for an engine that has stopped
            with self.condition:  # nothing is queued after that
                self.is_stopping = True
            error = APIError(503, "the engine has stopped")
            self.fail([*self.running.values(), *self.waiting, *self.arrived], error)
            for _, future in self.calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def receive(self) -> bool:
        """Take new requests; wait for them if there is nothing to do. False: the thread must end."""
        with self.condition:
            while not (self.arrived or self.aborted or self.calls or self.is_stopping or self.running or self.waiting):
                self.condition.wait()
            arrived, aborted, calls = self.arrived, set(self.aborted), self.calls
            self.arrived, self.aborted, self.calls = [], [], []
        self.waiting += filter(self.has_adapter, arrived)
        if aborted:
            self.waiting = deque(item for item in self.waiting if item.request_id not in aborted)
            for request_id in aborted & self.running.keys():
                self.engine.abort(request_id)
                del self.running[request_id]
        for function, future in calls:
            run_call(function, future)
        return not self.is_stopping

    def has_adapter(self, item: QueuedRequest) -> bool:
        """Whether the adapter of a request is still there; else the request fails."""
        if item.adapter is None or item.adapter in self.adapters.states:
            return True
        error = APIError(404, f"the model {item.adapter!r} does not exist", "model", "model_not_found")
        self.call_loop(lambda: item.outputs.put_nowait(error))
        return False

    def admit(self) -> None:
        """Pass waiting requests to the engine, as many as it has free rows."""
        if not self.running and self.waiting and not self.selected():
            self.switch(self.waiting[0].adapter)
        for item in self.selected()[: self.engine.max_num_seqs - len(self.running)]:
            self.waiting.remove(item)
            self.running[item.request_id] = item
            self.engine.add_request(item.request)

    def selected(self) -> list[QueuedRequest]:
        """Waiting requests that may run with the active adapter."""
        matching = [item for item in self.waiting if item.adapter == self.adapters.active]
        is_only_adapter = len(matching) == len(self.waiting)
        return [item for item in matching if is_only_adapter or item.request_id in self.turn]

    def switch(self, adapter: str | None) -> None:
        """Activate an adapter. Captured graphs read the weights of the adapter with which they were captured."""
        self.graphs[self.adapters.active] = self.engine.replace_graphs(self.graphs.pop(adapter, None) or StepGraphs())
        self.adapters.activate(adapter)
        self.turn = {item.request_id for item in self.waiting if item.adapter == adapter}

    def send(self, outputs: Iterable[TokenOutput]) -> None:
        pairs: list[tuple[asyncio.Queue[Output], Output]] = []
        for output in outputs:
            if (item := self.running.get(output.request_id)) is None:
                continue
            pairs.append((item.outputs, output))
            if output.finish_reason is not None:
                del self.running[output.request_id]
        self.call_loop(lambda: [queue.put_nowait(output) for queue, output in pairs])

    def fail_running(self, message: str) -> None:
        items = list(self.running.values())
        self.running = {}
        for item in items:
            self.engine.abort(item.request_id)
        self.fail(items, APIError(500, message))

    def fail(self, items: Iterable[QueuedRequest], error: APIError) -> None:
        self.call_loop(lambda: [item.outputs.put_nowait(error) for item in items])

    def call_loop(self, function: Callable[[], object]) -> None:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop has ended
            self.is_stopping = True


def run_call(function: Callable[[], None], future: "Future[None]") -> None:
    """Run a function for a future, unless it was canceled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except (UserError, APIError, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        future.set_exception(error)
