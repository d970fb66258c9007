"""Transfers between ranks in a step and their seconds: hidden states, features over bridges, gradient syncs."""

import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.base.devices import EXCHANGE_SHARE, MESSAGE_BYTES_PER_S
from dflop.base.kernels import kernel
from dflop.config import ClusterConfig, host_bytes_per_s, ring_latency_s
from dflop.costs import HOST, Link, LinkModel
from dflop.plan import PLACEMENTS, Plan
from dflop.schedule.edge_bytes import EdgeBytes
from dflop.step import Bridges, StageReplicas, stages_of

__all__ = ["TransferForms", "Transfers", "find_link", "to_host_bytes_per_s"]


Ranks = TypeVar("Ranks", int, np.ndarray)


class TransferForms(NamedTuple):
    """Latencies and seconds for each byte: to the next stage [num_nodes], and over bridges [num_encoder_replicas,
    num_llm_replicas], where the replicas of all encoders stand one after the other."""

    chain_latency_s: np.ndarray
    chain_byte_s: np.ndarray
    bridge_latency_s: np.ndarray
    bridge_byte_s: np.ndarray


class Transfers:
    """Seconds of a plan's transfers over the links of a cluster: measured links where there are such, else configured
    ones."""

    def __init__(self, plan: Plan, links: LinkModel, cluster: ClusterConfig) -> None:
        self.plan, self._links, self._cluster = plan, links, cluster
        self._stages = stages_of(plan)

    def chain_s(self, edge_tokens: Mapping[str, np.ndarray], edge_bytes: EdgeBytes) -> np.ndarray:
        """Seconds of the transfer to the module's next stage, 0 without one, [num_nodes, num_microbatches].

        `edge_tokens` are each module's tokens (`assignment.edge_tokens`), [dp, num_microbatches].
        """
        seconds = []
        for module, tokens in edge_tokens.items():
            of_size = {}
            for stays, size in zip(self._stays_in_node[module], edge_bytes.onward[module].tolist(), strict=False):
                if size not in of_size:  # many boundaries are alike
                    of_size[size] = [
                        find_link(self._links, self._cluster, "p2p", is_intra).seconds(tokens * size)
                        for is_intra in (True, False)
                    ]
                seconds.append(np.where(stays[:, None], *of_size[size]))
            seconds.append(np.zeros(np.shape(tokens)))
        return np.concatenate(seconds)

    @cached_property
    def _stays_in_node(self) -> dict[str, list[np.ndarray]]:
        """For each stage of each module but the last: whether its transfer to the next stage stays inside a node of the
        cluster, [dp] each."""
        stays: dict[str, list[np.ndarray]] = {grid.module: [] for grid in self.plan.grids}
        for stage, behind in itertools.pairwise(self._stages):
            if stage.module == behind.module:
                replicas = np.arange(stage.dp)
                ends = (self._first_ranks(end, replicas) for end in (stage, behind))
                stays[stage.module].append(self._is_intra(*ends))
        return stays

    def bridges(
        self, encoder_rank: np.ndarray, llm_dp_rank: np.ndarray, microbatch: np.ndarray, num_bytes: np.ndarray
    ) -> Bridges:
        """One message for every (encoder replica, LLM replica, microbatch) that features travel between.

        `encoder_rank` and `num_bytes`, the bytes that a sample adds to its message, are [num_samples, num_encoders];
        the other arrays are [num_samples].
        """
        encoders, _ = self._ends_of_bridges
        if not (PLACEMENTS[self.plan.placement].has_bridges and encoders):
            return Bridges.none()
        each = [
            self._bridges_of(encoder, encoder_rank[:, column], llm_dp_rank, microbatch, num_bytes[:, column])
            for column, encoder in enumerate(encoders)
        ]
        source, target, microbatch, seconds = map(np.concatenate, zip(*each, strict=True))
        return Bridges(source=source, target=target, microbatch=microbatch, seconds=seconds)

    def _bridges_of(
        self,
        encoder: StageReplicas,
        encoder_rank: np.ndarray,
        llm_dp_rank: np.ndarray,
        microbatch: np.ndarray,
        num_bytes: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One encoder's messages: the four arrays of `Bridges`. The given arrays are [num_samples]."""
        _, llm = self._ends_of_bridges
        ends = encoder_rank, llm_dp_rank, microbatch
        source, target, microbatch, sent_bytes = _messages_of(*ends, num_bytes, llm.dp, self.plan.num_microbatches)
        seconds = self._p2p_s(
            self._first_ranks(encoder, source),
            self._first_ranks(llm, target),
            sent_bytes,
        )
        seconds *= self._num_copies(encoder, source, target)
        return encoder.first_node + source, llm.first_node + target, microbatch, seconds

    def forms(self) -> "TransferForms":
        """Transfers along chains and over bridges, as a latency and seconds for each byte."""
        chain, bridge = {}, {}
        encoders, llm = self._ends_of_bridges
        target = np.arange(llm.dp)[None, :]
        stays_in_node, num_copies = [np.empty((0, llm.dp), dtype=bool)], [np.empty((0, llm.dp))]
        for encoder in encoders:
            source = np.arange(encoder.dp)[:, None]
            stays_in_node.append(self._is_intra(self._first_ranks(encoder, source), self._first_ranks(llm, target)))
            num_copies.append(self._num_copies(encoder, source, target))
        for name in ("latency_s", "byte_s"):
            intra, inter = (
                _form_of(find_link(self._links, self._cluster, "p2p", is_intra), name) for is_intra in (True, False)
            )
            of_stages = []
            for grid in self.plan.grids:
                of_stages += [np.where(stays, intra, inter) for stays in self._stays_in_node[grid.module]]
                of_stages.append(np.zeros(grid.dp))
            chain[name] = np.concatenate(of_stages)
            bridge[name] = np.where(np.concatenate(stays_in_node), intra, inter) * np.concatenate(num_copies)
        return TransferForms(chain["latency_s"], chain["byte_s"], bridge["latency_s"], bridge["byte_s"])

    def gradient_sync_s(self, stage: StageReplicas, num_bytes: float) -> float:
        """Seconds to sum a stage's gradients over its replicas, and to send the parameters back to all of them.

        `num_bytes` are those of `costs.sync_bytes`. Replicas that shard the parameters sum gradients inside their
        passes; here the copies of each shard are synced.
        """
        num_shards = self.plan.grid(stage.module).num_shards
        num_copies = stage.dp // num_shards
        if num_copies == 1:
            return 0.0
        link = self._sync_link(stage, np.arange(stage.dp).reshape(num_copies, num_shards).T)
        return link.seconds(num_bytes / num_shards)

    def sharing_link(self, module: str) -> Link:
        """The link of a gradient sync among the replicas that shard one copy of the module's parameters, where it is
        slowest."""
        stage = next(stage for stage in self._stages if stage.module == module)
        num_shards = self.plan.grid(module).num_shards
        return self._sync_link(stage, np.arange(stage.dp).reshape(-1, num_shards))

    def exchange_byte_s(self) -> float:
        """Seconds of a byte that comes to a replica of the LLM from those that share samples with it: over the links of
        a node if no such group spans two."""
        llm = self.plan.grid("llm")
        size, per_node = llm.cp * llm.tp, self._cluster.devices_per_node
        firsts = np.arange(llm.rank_offset, llm.rank_offset + llm.num_ranks, size)
        is_intra = bool((firsts // per_node == (firsts + size - 1) // per_node).all())
        return 1 / find_link(self._links, self._cluster, "exchange", is_intra, llm.cp).bytes_per_s

    def host_s(self, num_bytes: float) -> float:
        """Seconds in which a device copies so many bytes to its host and back, in sum of both. On a CPU nothing is
        copied farther than anything else.

        Raises:
            UserError: as `to_host_bytes_per_s`.
        """
        if not num_bytes or self._cluster.device != "cuda":
            return 0.0
        return num_bytes / to_host_bytes_per_s(self._links, self._cluster)

    def _sync_link(self, stage: StageReplicas, replicas: np.ndarray) -> Link:
        """The link of gradient syncs among groups of a stage's replicas [num_groups, num_members], for the slowest."""
        num_groups, num_members = replicas.shape
        nodes = self._first_ranks(stage, replicas) // self._cluster.devices_per_node
        _, counts = np.unique(np.arange(num_groups)[:, None] * self._cluster.num_nodes + nodes, return_counts=True)
        num_cards = int(counts.min())  # a group inside one node has all its members there
        is_intra = num_cards == num_members
        return find_link(self._links, self._cluster, "gradient_sync", is_intra, num_members, num_cards)

    def _num_copies(self, encoder: StageReplicas, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """How many copies of a message a rank sends, as the mean of both directions.

        Every rank of the receiving replica gets one copy, unless it makes the data itself. A rank of the module with
        the smaller tp sends a copy to each rank of the larger tp that it feeds; on the way back it gets a copy from one
        of them.
        """
        _, llm = self._ends_of_bridges
        ratio = max(encoder.tp, llm.tp) / min(encoder.tp, llm.tp)
        if not PLACEMENTS[self.plan.placement].shares_ranks:
            return np.full(np.broadcast(source, target).shape, (ratio + 1) / 2)
        here, there = encoder.first_worker + source * encoder.span, llm.first_worker + target * llm.span
        are_apart = (here >= there + llm.span) | (there >= here + encoder.span)
        return np.where(are_apart, ratio + 1, ratio - 1) / 2

    @cached_property
    def _ends_of_bridges(self) -> tuple[list[StageReplicas], StageReplicas]:
        """Each encoder's last stage, and the LLM's first."""
        last = {stage.module: stage for stage in self._stages}
        llm = next(stage for stage in self._stages if stage.module == "llm")
        return [last[grid.module] for grid in self.plan.grids[:-1]], llm

    def _p2p_s(self, first: np.ndarray, second: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        intra, inter = (
            find_link(self._links, self._cluster, "p2p", is_intra).seconds(num_bytes) for is_intra in (True, False)
        )
        return np.where(self._is_intra(first, second), intra, inter)

    def _is_intra(self, first: Ranks, second: Ranks) -> bool | np.ndarray:
        return first // self._cluster.devices_per_node == second // self._cluster.devices_per_node

    def _first_ranks(self, stage: StageReplicas, replica: Ranks) -> Ranks:
        grid = self.plan.grid(stage.module)
        return grid.first_rank(stage.pp_stage % grid.pp, replica)


def _form_of(link: Link, name: str) -> float:
    return link.latency_s if name == "latency_s" else 1 / link.bytes_per_s


def find_link(
    links: LinkModel, cluster: ClusterConfig, kind: str, is_intra: bool, num_ranks: int = 2, num_cards: int = 1
) -> Link:
    """The measured link; where none was measured, one with the configured bandwidth.

    A configured gradient sync is taken to be two rings over each network card, one that sums and one that gathers, each
    with its latency (`ring_latency_s`). Between nodes, the ranks of a node use all their network cards: 8 ranks have 8
    times the bandwidth of one card, but no more than the links inside a node. `num_cards` are those of the node that
    has fewest. A message from one rank to another has no latency and one card, and on GPUs no more than its few thread
    blocks carry. An exchange where messages alone were measured has their link.
    """
    scope = "intra" if is_intra else "inter"
    measured = links.find(kind, scope, num_ranks)
    if measured is None and kind == "exchange":
        measured = links.find("p2p", scope, 2)
    if measured is not None:
        return measured
    gbps = cluster.intra_node_gbps if is_intra else cluster.inter_node_gbps
    if not is_intra:
        gbps = min(num_cards * gbps, max(gbps, cluster.intra_node_gbps))
    bytes_per_s = gbps * 1e9 / 8
    if kind == "exchange":
        return Link(0.0, bytes_per_s * EXCHANGE_SHARE if cluster.device == "cuda" else bytes_per_s)
    if kind == "p2p":
        return Link(0.0, min(bytes_per_s, MESSAGE_BYTES_PER_S) if cluster.device == "cuda" else bytes_per_s)
    num_nodes = 1 if is_intra else -(-num_ranks // num_cards)
    return Link(2 * ring_latency_s(cluster, num_ranks, num_nodes), bytes_per_s * num_ranks / (2 * (num_ranks - 1)))


def to_host_bytes_per_s(links: LinkModel, cluster: ClusterConfig) -> float:
    """What a device copies to its host's memory, or from there, while all do: measured, or by its data sheet.

    Raises:
        UserError: if neither says it.
    """
    measured = links.find(HOST, "intra", cluster.devices_per_node)
    return measured.bytes_per_s if measured else host_bytes_per_s(cluster)


@kernel
def _messages_of(encoder_rank, llm_dp_rank, microbatch, num_bytes, num_llm_replicas, num_microbatches):
    """The messages in which samples [num_samples] travel, ordered by source, target and microbatch: these three and the
    bytes, [num_messages] each. Samples without bytes are in none."""
    sent = np.flatnonzero(num_bytes)
    places = (encoder_rank[sent] * num_llm_replicas + llm_dp_rank[sent]) * num_microbatches + microbatch[sent]
    order = np.argsort(places, kind="mergesort")
    message_bytes, of_message = np.zeros(len(sent)), np.empty(len(sent), dtype=np.int64)
    count = 0
    for number in order:
        if count == 0 or of_message[count - 1] != places[number]:
            of_message[count] = places[number]
            count += 1
        message_bytes[count - 1] += num_bytes[sent[number]]
    pairs, of_message = of_message[:count] // num_microbatches, of_message[:count] % num_microbatches
    return pairs // num_llm_replicas, pairs % num_llm_replicas, of_message, message_bytes[:count]
