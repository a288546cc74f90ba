from cluster.experiments.turn_clock import TurnClock


def test_a_paused_clock_stands_and_goes_on_where_it_stood() -> None:
    now = [10.0]
    clock = TurnClock(lambda: now[0])
    start_s = clock()

    now[0] = 12.0
    clock.pause()
    now[0] = 20.0
    assert clock() - start_s == 2.0
    # Whoever pauses or resumes it twice changes nothing.
    clock.pause()
    now[0] = 30.0
    clock.resume()
    clock.resume()
    assert clock() - start_s == 2.0
    now[0] = 31.0
    assert clock() - start_s == 3.0
