"""The self-test of a configuration: can anything ever be resumed under it, and from where on?"""

from hetero_kv.prefix.costs import Costs
from hetero_kv.prefix.plan import Geometry, Presence, plan
from hetero_kv.prefix.policy import Policy

MOST = 1 << 12  # multiples of G that are looked at


def shortest_resumable(
    geometry: Geometry, policy: Policy, costs: Costs | None = None, on_disk: bool = False
) -> int:
    """The shortest prefix, in tokens, that a prompt one token longer resumes; 0: there is none.

    Everything that the policy stores of that prompt is taken to be stored, in host memory, or on
    disk alone. Beyond some length all prompts are taken to be alike.
    """

    def resumes(multiples: int) -> bool:
        length = multiples * geometry.granularity
        points = frozenset(policy.checkpoints.points(length + 1, geometry))
        blocks = length // geometry.block
        presence = Presence((True,) * blocks, points)
        if on_disk:
            presence = Presence((True,) * blocks, points, frozenset(range(blocks)), points)
        found = plan(
            geometry,
            length + 1,
            presence,
            replay=policy.checkpoints.replay,
            bound=policy.checkpoints.bound,
            costs=costs,
        )
        return found.resumable_length > 0

    most = 1
    while not resumes(most):
        most *= 2
        if most > MOST:
            return 0
    least = most // 2
    while most - least > 1:  # resumes(most), not resumes(least)
        middle = (least + most) // 2
        least, most = (least, middle) if resumes(middle) else (middle, most)
    return most * geometry.granularity
