"""Where the elements of a top-level JSON list begin and end: a scan over bytes that follows strings and brackets."""

import numpy as np

from dflop.base.kernels import kernel

__all__ = ["find_cuts"]


@kernel
def find_cuts(chunk, state):
    """Positions in `chunk` of the top-level list's opening bracket, commas and closing bracket; the scan ends there.

    `chunk` is uint8 [num_bytes], the result int64 [num_positions]. `state` int64 [3] holds the depth and whether the
    last byte is inside a string and a backslash; it is updated in place, for the next chunk.
    """
    positions = np.empty(1024, dtype=np.int64)
    count = 0
    depth, in_string, escaped = state[0], state[1], state[2]
    for at in range(len(chunk)):
        byte = chunk[at]
        if in_string:
            if escaped:
                escaped = 0
            elif byte == 92:  # \
                escaped = 1
            elif byte == 34:  # "
                in_string = 0
            continue
        is_cut = False
        if byte == 34:
            in_string = 1
        elif byte == 91 or byte == 123:  # [ {
            depth += 1
            is_cut = depth == 1
        elif byte == 93 or (byte == 125 and depth > 1):  # ] }; a brace does not close the list itself
            depth -= 1
            is_cut = depth == 0
        elif byte == 44:  # ,
            is_cut = depth == 1
        if is_cut:
            if count == len(positions):
                larger = np.empty(2 * count, dtype=np.int64)
                larger[:count] = positions
                positions = larger
            positions[count] = at
            count += 1
            if depth == 0:
                break
    state[0], state[1], state[2] = depth, in_string, escaped
    return positions[:count]
