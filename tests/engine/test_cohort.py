"""Driving coroutine clients, and who is asked when."""

from llm_fed.federation.schedule import Delayed
from llm_fed.method.requests import Request
from llm_fed.runtime.local import drive


class F(Request[str]): ...


class G(Request[str]): ...


class X(Request[str]): ...


KINDS = {"f": F, "g": G, "x": X}


def test_equal_requests_run_together_and_failures_stay_alone():
    calls = []

    async def client(name: str, kinds: str) -> str:
        got = [await KINDS[kind](name, "a structure") for kind in kinds]
        return "".join(got)

    def execute(requests):
        calls.append("".join(request.site for request in requests))
        (kind,) = {kind for kind, its in KINDS.items() if its is type(requests[0])}
        return [ValueError("no") if kind == "x" else f"{kind}{request.site}" for request in requests]

    outcomes = drive(
        {"a": client("a", "fg"), "b": client("b", "fx"), "c": client("c", "g"), "d": client("d", "")}, execute
    )
    assert outcomes["a"] == "faga" and outcomes["c"] == "gc" and outcomes["d"] == ""
    assert isinstance(outcomes["b"], ValueError)
    assert calls == ["ab", "c", "a", "b"]
    assert list(outcomes) == ["a", "b", "c", "d"]


def test_a_client_may_handle_its_failure():
    async def client() -> str:
        try:
            await F("a", "a structure")
        except ValueError:
            return "handled"
        return "not reached"

    assert drive({"a": client()}, lambda requests: [ValueError()]) == {"a": "handled"}


def test_cohorts_depend_on_seed_and_round_alone():
    names = tuple(f"c{i}" for i in range(30))
    schedule = Delayed(names, 0.1, seed=1)
    cohorts = [[ask.client for ask in schedule.asks(round)] for round in range(1, 40)]
    assert all(len(cohort) == 3 == len(set(cohort)) for cohort in cohorts)
    assert cohorts[6] == [ask.client for ask in schedule.asks(7)]  # no memory of earlier calls
    assert len({client for cohort in cohorts for client in cohort}) > 25
    assert cohorts != [[ask.client for ask in Delayed(names, 0.1, seed=2).asks(round)] for round in range(1, 40)]
    assert [ask.client for ask in Delayed(names).asks(1)] == list(names)
    assert all(ask.delay == 0 for ask in schedule.asks(1))
