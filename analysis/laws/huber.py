"""Many small robust fits at once: least sum of Huber(y - log sum_k exp(M_k theta)) within a box.

The terms z_k = M_k theta are linear in theta, so gradient and Hessian are exact and cheap (s: softmax over the terms):

    J = sum_k s_k M_k,     Hessian of log sum exp = sum_k s_k M_k M_k' - J J'

One iteration tries two damped steps and keeps the better: Newton's, quadratic near the optimum, and the reweighted
least-squares step, which descends from anywhere. At a Huber width far below the noise the loss is all but an absolute
value: reweighting alone creeps, quasi-Newton methods stop on the kinks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CHUNK = 30_000  # points of all fits done at once: their tables stay in a core's cache
MOST_DAMPING = 1e12
ITERATIONS = 250
QUIET = 8  # iterations without gain that end a fit


@dataclass(frozen=True)
class Problem:
    """terms: M [terms, points, parameters]. lower, upper: the box [parameters]. delta: Huber's width, in log units."""

    terms: Floats
    lower: Floats
    upper: Floats
    delta: float

    def predicted(self, theta: Floats) -> Floats:
        """log L [..., points] of theta [..., parameters]."""
        z = self.z(theta)
        top = z.max(axis=0)
        return np.asarray(top + np.log(np.exp(z - top).sum(axis=0)))

    def loss(self, theta: Floats, y: Floats, weight: Floats) -> Floats:
        """Weighted sum of Huber losses [...]; theta [..., parameters], y and weight [..., points]."""
        return self._sum(y - self.predicted(theta), weight)

    def gradient(self, theta: Floats, y: Floats, weight: Floats) -> Floats:
        """Derivative of `loss` by theta [..., parameters]."""
        jacobian, residual = self.jacobian(theta), y - self.predicted(theta)
        pull = -weight * np.clip(residual, -self.delta, self.delta)
        return np.asarray(np.einsum("...n,...np->...p", pull, jacobian))

    def jacobian(self, theta: Floats) -> Floats:
        """d log L / d theta [..., points, parameters]."""
        return np.asarray(np.einsum("k...n,knp->...np", self.shares(theta), self.terms))

    def shares(self, theta: Floats) -> Floats:
        """Each term's share of the loss [terms, ..., points]."""
        return np.asarray(np.exp(self.z(theta) - self.predicted(theta)))

    def z(self, theta: Floats) -> Floats:
        """Logarithms of the terms [terms, ..., points]."""
        return np.stack([theta @ term.T for term in self.terms])

    def _sum(self, residual: Floats, weight: Floats) -> Floats:
        size = np.abs(residual)
        inside = np.minimum(size, self.delta)
        return np.asarray((weight * (inside * size - 0.5 * inside * inside)).sum(-1))


def minimise(problem: Problem, start: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """(theta [fits, parameters], loss [fits]) from start [fits, parameters]; y, weight [fits or 1, points]."""
    fits, points = len(start), problem.terms.shape[1]
    y, weight = (np.broadcast_to(table, (fits, points)) for table in (y, weight))
    size = max(1, CHUNK // points)
    descent = _Descent(problem)
    parts = [descent.run(start[i : i + size], y[i : i + size], weight[i : i + size]) for i in range(0, fits, size)]
    return np.concatenate([theta for theta, _ in parts]), np.concatenate([loss for _, loss in parts])


class _Descent:
    """The iteration, with the products of the terms' columns that every Hessian is a weighted sum of."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.width = problem.terms.shape[2]
        self.columns = [np.flatnonzero(np.any(term != 0, axis=0)) for term in problem.terms]
        used = [term[:, columns] for term, columns in zip(problem.terms, self.columns, strict=True)]
        self.used = used
        self.products = {
            (k, m): np.einsum("np,nq->npq", used[k], used[m]).reshape(len(used[k]), -1)
            for k in range(len(used))
            for m in range(k, len(used))
        }

    def run(self, start: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
        problem = self.problem
        theta = np.clip(start, problem.lower, problem.upper)
        loss = problem.loss(theta, y, weight)
        damping = np.full((2, len(theta)), 1e-3)  # of Newton's step and of the reweighted one
        quiet = np.zeros(len(theta), dtype=int)
        live = np.arange(len(theta))
        for _ in range(ITERATIONS):
            here, before = theta[live], loss[live]
            gradient, newton, easy = self._curvatures(here, y[live], weight[live])
            blocked = ((here <= problem.lower) & (gradient > 0)) | ((here >= problem.upper) & (gradient < 0))
            scale = np.maximum(np.diagonal(easy, axis1=1, axis2=2), 1e-14)
            settled = np.zeros(len(live), dtype=bool)
            for which, curvature in enumerate((newton, easy)):
                # The second step is for those whom the first does not serve.
                some = np.arange(len(live)) if which == 0 else np.flatnonzero(damping[0, live] > 1e-4)
                if not len(some):
                    continue
                at = live[some]
                step = _step(curvature[some], gradient[some], scale[some] * damping[which, at, None], blocked[some])
                tried = np.clip(here[some] + step, problem.lower, problem.upper)
                losses = problem.loss(tried, y[at], weight[at])
                better = losses < loss[at]
                fine = losses < before[some]
                damping[which, at] = np.clip(damping[which, at] * np.where(fine, 0.15, 6.0), 1e-15, MOST_DAMPING)
                theta[at[better]], loss[at[better]] = tried[better], losses[better]
                if which == 0:  # Newton's step, undamped, has nothing more to promise
                    promised = -(gradient * (tried - here)).sum(1)
                    settled = (np.abs(promised) < 1e-12 * before + 1e-26) & (damping[0, live] < 1e-3)
            gain = before - loss[live]
            quiet[live] = np.where(gain > 1e-9 * before + 1e-22, 0, quiet[live] + 1 + 3 * settled)
            live = live[quiet[live] < QUIET]
            if not len(live):
                break
        return theta, loss

    def _curvatures(self, theta: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats, Floats]:
        """(gradient [fits, p], exact Hessian [fits, p, p], Hessian of the reweighted least squares [fits, p, p])."""
        problem, width = self.problem, self.width
        z = problem.z(theta)
        top = z.max(axis=0)
        shares = np.exp(z - top)
        total = shares.sum(axis=0)
        shares /= total
        residual = y - top - np.log(total)
        size = np.abs(residual)
        pull = -weight * np.clip(residual, -problem.delta, problem.delta)
        steep = weight * (size <= problem.delta) - pull
        gentle = weight / np.maximum(1.0, size / problem.delta)
        gradient = np.zeros((len(theta), width))
        exact, easy = np.zeros((2, len(theta), width, width))
        for k, columns in enumerate(self.columns):
            gradient[:, columns] += (pull * shares[k]) @ self.used[k]
        for (k, m), product in self.products.items():
            both = shares[k] * shares[m]
            bend = steep * both + (pull * shares[k] if k == m else 0.0)
            shape = (len(theta), len(self.columns[k]), len(self.columns[m]))
            for matrix, by in ((exact, bend), (easy, gentle * both)):
                part = (by @ product).reshape(shape)
                matrix[:, self.columns[k][:, None], self.columns[m]] += part
                if k != m:
                    matrix[:, self.columns[m][:, None], self.columns[k]] += part.transpose(0, 2, 1)
        return gradient, exact, easy


def _step(curvature: Floats, gradient: Floats, damping: Floats, blocked: NDArray[np.bool_]) -> Floats:
    """-(curvature + diag(damping))^-1 gradient over the coordinates that may move [fits, p]."""
    free = ~blocked
    matrix = curvature * (free[:, :, None] & free[:, None, :])
    places = np.arange(gradient.shape[1])
    matrix[:, places, places] += damping + blocked
    right = np.where(free, -gradient, 0.0)[..., None]
    try:
        step = np.linalg.solve(matrix, right)[..., 0]
    except np.linalg.LinAlgError:  # one singular matrix spoils the batch
        step = (np.linalg.pinv(matrix) @ right)[..., 0]
    return np.clip(np.nan_to_num(step), -20.0, 20.0)
