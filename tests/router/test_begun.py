import asyncio

import pytest

from router.begun import Begun


async def test_it_has_run_up_to_its_first_wait_and_the_rest_runs_where_it_is_awaited():
    done, wake = list[str](), asyncio.get_running_loop().create_future()

    async def work() -> None:
        done.append("begun")
        await wake
        done.append("woken")
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        done.append("ended")

    begun = Begun(work())
    assert done == ["begun"]

    async def rest() -> None:
        await begun

    task = asyncio.create_task(rest())
    await asyncio.sleep(0)
    assert done == ["begun"]
    wake.set_result(None)
    await task
    assert done == ["begun", "woken", "ended"]


async def test_what_it_waits_for_may_have_come_before_it_is_awaited():
    wake = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await wake

    begun = Begun(work())
    wake.set_result(None)
    await asyncio.sleep(0)
    await asyncio.wait_for(begun, 1)


async def test_one_that_never_waits_is_done_at_once():
    async def work() -> None:
        pass

    await Begun(work())


async def test_errors_are_raised_where_they_occur():
    async def at_once() -> None:
        raise ValueError("first")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="first"):
        Begun(at_once())
    begun = Begun(later())
    with pytest.raises(ValueError, match="later"):
        await begun


@pytest.mark.parametrize("num_turns", [0, 1, 3])
async def test_cancelling_who_awaits_it_cancels_it_and_lets_it_clean_up(num_turns):
    done, lock = list[str](), asyncio.Lock()

    async def work() -> None:
        try:
            async with lock:
                await asyncio.sleep(0)
                await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    begun = Begun(work())
    assert lock.locked()

    async def rest() -> None:
        await begun

    task = asyncio.create_task(rest())
    for _ in range(num_turns + 1):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["cleaned up"]
    assert not lock.locked()


async def test_closed_it_lets_go_of_what_it_holds():
    lock = asyncio.Lock()

    async def work() -> None:
        async with lock:
            await asyncio.get_running_loop().create_future()

    Begun(work()).close()
    assert not lock.locked()
