"""Time of a training step on the GPU, for the peers' scripts."""
import statistics

import torch


def step_ms(step, steps):
    """Median milliseconds of `steps` calls of step(), which returns the loss, by CUDA events, after 5 to warm up."""
    for _ in range(5):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    if not torch.isfinite(loss):
        raise SystemExit("error: the loss is not finite")
    return statistics.median(start.elapsed_time(end) for start, end in zip(events, events[1:]))
