"""What the launcher says while no rank says anything."""

from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.launcher.session import SilenceWatch


def test_the_start_is_told_often_at_first_and_until_a_rank_itself_speaks(
    snapshot: SnapshotAssertion,
) -> None:
    silence = SilenceWatch()
    silence.heard("[W1115 13:00:00.1 socket.cpp:1] a warning of torch's\n")
    said = [silence.words() for _ in range(60)]
    assert said[:7] == [said[0]] * 7
    assert [n for n, words in enumerate(said) if words][7:] == [29, 59]
    assert {"starting": said[0], "running": said[29]} == snapshot
    silence.heard("loss 1\n")
    assert silence.words() == ""


def test_a_silence_is_told_when_it_is_twice_as_long_as_the_last_one_told(
    snapshot: SnapshotAssertion,
) -> None:
    now = 1000.0
    silence = SilenceWatch(lambda: now)
    silence.heard("loss 1\n")
    said = []
    for _ in range(50):  # 450 s of silence
        now += 9.0
        if words := silence.words():
            said.append(words)
    assert len(said) == 4
    assert said == snapshot
    silence.heard("loss 2\n")
    now += 60.0  # such silences are known by now
    assert silence.words() == ""
