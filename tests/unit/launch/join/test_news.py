"""News from the door come at a bounded rate, and nothing is left out of the count."""

import asyncio

from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.transports.join.connection_handler import JoinNews


def test_the_first_is_told_at_once_and_the_others_are_counted(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        news = JoinNews(told.put_nowait, 0.05)
        for number in range(1000):
            news.note("a wrong join code", f"10.0.0.{number % 7}")
        assert told.get_nowait() == snapshot
        assert told.empty()
        assert await told.get() == snapshot  # 999 more, the last from 10.0.0.5
        news.note("a wrong join code", "10.0.0.9")  # within the next interval
        assert told.empty()
        assert "1 more time" in await told.get()
        news.note("a connection that sent nothing", "10.0.0.9")  # another kind waits for nobody
        assert "sent nothing" in told.get_nowait()
        news.close()

    asyncio.run(story())
