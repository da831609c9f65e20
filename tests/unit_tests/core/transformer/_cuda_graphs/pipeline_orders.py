"""Provide a Hypothesis strategy for pipeline orders."""

from hypothesis import strategies as st


@st.composite
def orders(draw):
    """Draw a pipeline order, the number of layers of each chunk, and the number of micro-batches.

    Some chunks delay weight gradients.
    """
    layers = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    microbatches = draw(st.integers(1, 4))
    forwards = dict.fromkeys(range(1, len(layers) + 1), microbatches)
    running = dict.fromkeys(forwards, 0)
    delaying = draw(st.sets(st.sampled_from(list(forwards))))
    delayed = dict.fromkeys(delaying, 0)
    order: list[float] = []
    while True:
        possible = [chunk for chunk, left in forwards.items() if left]
        possible += [-chunk for chunk, count in running.items() if count]
        possible += [-chunk - 0.5 for chunk, count in delayed.items() if count]
        if not possible:
            return order, layers, microbatches
        step = draw(st.sampled_from(possible))
        order.append(step)
        if step > 0:
            forwards[step] -= 1
            running[step] += 1
        elif step % 1:
            delayed[-step - 0.5] -= 1
        else:
            running[-step] -= 1
            if -step in delaying:
                delayed[-step] += 1
