"""Jobs that run at once, for tests."""

import threading


def in_threads(jobs, seconds):
    """Runs all jobs at once; raises what the first of them raised. seconds: that none takes."""
    errors, start = [], threading.Barrier(len(jobs))

    def run(job):
        start.wait(seconds)
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[x], daemon=True) for x in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(x.is_alive() for x in threads), "deadlock"
    if errors:
        raise errors[0]
