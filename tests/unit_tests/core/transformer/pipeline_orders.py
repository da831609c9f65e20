"""Random pipeline orders."""

from hypothesis import strategies as st


@st.composite
def orders(draw):
    """A valid order with the number of layers of each chunk."""
    layers = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    microbatches = draw(st.integers(1, 4))
    forwards = dict.fromkeys(range(1, len(layers) + 1), microbatches)
    running = dict.fromkeys(forwards, 0)
    order: list[int] = []
    while True:
        possible = [chunk for chunk, left in forwards.items() if left]
        possible += [-chunk for chunk, count in running.items() if count]
        if not possible:
            return order, layers, microbatches
        step = draw(st.sampled_from(possible))
        order.append(step)
        if step > 0:
            forwards[step] -= 1
            running[step] += 1
        else:
            running[-step] -= 1
