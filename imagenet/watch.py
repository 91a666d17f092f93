"""What watches a training, for main.py, until watch.py is rebuilt."""

import contextlib
import time

from monitor import Monitor


class Watch(Monitor):
    def __init__(self, folder, device, args, steps_done):
        super().__init__(folder, device, args)

    def batches(self, batches):
        batches = iter(batches)
        self.begun, self.steps = time.perf_counter(), 0
        while True:
            self.stopwatch.batch_wanted()
            batch = next(batches, None)
            self.stopwatch.batch_here()
            if batch is None:
                return
            yield batch
            self.steps += 1
            self.hangs.tick()
            self.profiler.step()

    def pace(self):
        return self.steps / (time.perf_counter() - self.begun)

    @contextlib.contextmanager
    def paused(self):
        self.hangs.pause()
        yield
        self.hangs.tick()

    def log(self, step, values):
        self.tracker.log(step, values)
