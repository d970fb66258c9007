"""Linear programs that are written row by row, and solved by SciPy's HiGHS."""

import numpy as np

__all__ = ["LinearProgram"]

# The solver's time limit. The largest programs known take 2 s.
_MOST_S = 30.0


class LinearProgram:
    """A linear program in variables of at least 0, which are numbered in the order in which they are made."""

    def __init__(self) -> None:
        self._num_variables = 0
        self._bounds: list[float] = []
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._factors: list[np.ndarray] = []

    def variables(self, *shape: int) -> np.ndarray:
        first = self._num_variables
        self._num_variables += int(np.prod(shape))
        return np.arange(first, self._num_variables).reshape(shape)

    def require(self, *terms: tuple[np.ndarray, np.ndarray | float], at_least: float = 0.0) -> None:
        """Require that the sum of all variables times their factors is at least `at_least`."""
        for variables, factors in terms:
            columns, factors = np.broadcast_arrays(variables, factors)
            self._rows.append(np.full(columns.size, len(self._bounds)))
            self._columns.append(columns.ravel())
            self._factors.append(factors.ravel())
        self._bounds.append(at_least)

    def minimise(self, *terms: tuple[np.ndarray, float]) -> np.ndarray | None:
        """The values of all variables at which the sum of `terms` is smallest; None where the solver finds none."""
        from scipy.optimize import linprog  # takes longer to import than most commands take
        from scipy.sparse import csr_array

        goal = np.zeros(self._num_variables)
        for variables, factor in terms:
            goal[variables] = factor
        matrix = csr_array(
            (np.concatenate(self._factors), (np.concatenate(self._rows), np.concatenate(self._columns))),
            shape=(len(self._bounds), self._num_variables),
        )
        result = linprog(
            goal, A_ub=-matrix, b_ub=-np.array(self._bounds), method="highs-ipm", options={"time_limit": _MOST_S}
        )
        return result.x if result.success else None
