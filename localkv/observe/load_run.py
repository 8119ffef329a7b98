"""A whole load: parts in order, within a number of requests and a time, up to the first giving up.

A ramp ends with the first step in which the server gave up. Queueing ends one of concurrency too,
except where running requests may still be pushed out of the cache (vLLM, SGLang): there it goes on
as long as more requests run than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from localkv.analysis.exhausted import exhaustion, highest, snapshots
from localkv.analysis.loaded import PARTS
from localkv.errors import EngineError
from localkv.observe.load import Bench, Task, run_step
from localkv.observe.load_plan import concurrency, context, prefix, scenarios
from localkv.snapshots import LoadLimits, LoadStep
from localkv.units import plural

#: Kinds of giving up after which more load shows nothing new.
_FINAL = ("cache full", "preempted", "refused")
_PUSH_OUT = ("vllm", "sglang")
#: Seconds that a step must have left to be worth a start.
_LEAST = 1.0


@dataclass(frozen=True)
class Budget:
    """What a load may cost: requests in all, and seconds in all."""

    requests: int
    seconds: float


class LoadRun:
    """Runs a load step by step; ``ended`` says why it stopped, empty while it runs."""

    def __init__(
        self,
        bench: Bench,
        limits: LoadLimits,
        budget: Budget,
        n_predict: int,
        parts: Sequence[str] = PARTS,
        tell: Callable[[Task], None] = lambda task: None,
    ) -> None:
        """Prepare ``parts`` of a load; ``tell`` hears of each step before it begins."""
        self.ended = ""
        self._bench, self._limits, self._budget = bench, limits, budget
        self._n_predict, self._parts, self._tell = n_predict, parts, tell
        self._sent = 0
        self._begun = 0.0

    def steps(self) -> Iterator[LoadStep]:
        """Yield each step when it is done.

        Raises:
            EngineError: the server stopped answering, or answers nothing but errors.
        """
        self._begun = self._bench.clock()
        final = ""
        for part, tasks in self._plan():
            before: LoadStep | None = None
            for task in () if final else tasks:
                if self._spent(task):
                    return
                self._tell(task)
                step = self._run(task)
                yield step
                self._check(step)
                found = exhaustion(step, self._bench.source.server)
                if found and part in ("concurrency", "context"):
                    final = found.kind if found.kind in _FINAL else ""
                    if self._enough(found.kind, before, step):
                        break
                before = step
        self.ended = "the server gave up" if final else "all steps done"

    def _plan(self) -> Iterator[tuple[str, Iterator[Task]]]:
        n, limits = self._n_predict, self._limits
        plan = {
            "scenarios": scenarios(n),
            "prefix": prefix(limits, n),
            "concurrency": concurrency(limits, n),
            "context": context(limits, n),
        }
        return ((part, plan[part]) for part in PARTS if part in self._parts)

    def _left(self) -> float:
        return self._budget.seconds - (self._bench.clock() - self._begun)

    def _spent(self, task: Task) -> bool:
        """Return whether ``task`` goes beyond the budget, and remember why."""
        if self._left() < _LEAST:
            self.ended = f"the time is up ({self._budget.seconds:g} s, --max-seconds)"
        elif self._sent + task.requests > self._budget.requests:
            self.ended = f"no more than {plural(self._budget.requests, 'request')} (--max-requests)"
        return bool(self.ended)

    def _run(self, task: Task) -> LoadStep:
        started = self._bench.clock() - self._begun
        step = run_step(self._bench, task, first=self._sent, timeout=self._left(), started=started)
        self._sent += step.concurrency
        return step

    def _enough(self, kind: str, before: LoadStep | None, step: LoadStep) -> bool:
        if kind != "queued":
            return True
        if step.part == "context":
            # No more were sent than may run at once: a longer one may still show what is full.
            return False
        if self._bench.source.server not in _PUSH_OUT:
            return True
        if before is None:
            return False
        ran, runs = (highest(snapshots(each), "running") or 0 for each in (before, step))
        return runs <= ran

    def _check(self, step: LoadStep) -> None:
        """Raise when there is nobody left to load."""
        errors = [r for r in step.requests if r.error]
        if len(errors) < len(step.requests):
            return
        if all(r.error_kind == "unreachable" for r in errors) and step.looks[-1].error:
            raise EngineError(
                f"{self._bench.url} stopped answering", "what was measured until then is kept"
            )
        if all(r.status in (401, 403, 404, 405, 501) for r in errors):
            raise EngineError(errors[0].error, "is this server made to generate?")
