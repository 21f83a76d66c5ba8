"""Owns the way to batch sizes: samples a step = samples of one backward x backward passes a step x ranks."""

from dataclasses import dataclass

from onefold.deepspeed.walk import Findings

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples a step on all ranks, samples of one backward on one rank, backward passes a step."""

    train: int
    micro: int
    accumulation: int


def batch_of(findings: Findings) -> Batch:
    """The three sizes; any two give the third, and accumulation is 1 where neither it nor both others are there.

    Where a size is "auto" or missing, what is given beside the configuration stands in for it. Problems are noted in
    `findings`; then the result only shows what the rest would give.
    """
    config, given = findings.config, findings.given
    train, micro, accumulation = (getattr(config, key) for key in BATCH_KEYS)
    if sum(size is not None for size in (train, micro, accumulation)) < 2:
        micro = given.micro_batch if micro is None else micro
    if sum(size is not None for size in (train, micro, accumulation)) < 2:
        accumulation = given.accumulation if accumulation is None else accumulation
    if train is None and micro is None:
        if not any(problem.path in BATCH_KEYS for problem in findings.problems):
            _leave_open(findings)
        return Batch((accumulation or 1) * (given.num_ranks or 1), 1, accumulation or 1)
    ranks = _ranks(findings, train, micro, accumulation)
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else max(1, train // (micro * ranks))
    if micro is None:
        micro = max(1, (train or 1) // (accumulation * ranks))
    if train is None:
        train = micro * accumulation * ranks
    if train != micro * accumulation * ranks:
        findings.refuse(_named(findings), _mismatch(train, micro, accumulation, ranks))
    _tell(findings, (train, micro, accumulation), ranks)
    return Batch(train, micro, accumulation)


def _ranks(findings: Findings, train: int | None, micro: int | None, accumulation: int | None) -> int:
    """How many ranks there are, or, where that is not known, how many the three sizes ask for."""
    if findings.given.num_ranks is not None:
        return findings.given.num_ranks
    if train is None or micro is None or accumulation is None or train % (micro * accumulation):
        return 1
    return train // (micro * accumulation)


def _tell(findings: Findings, sizes: tuple[int, int, int], ranks: int) -> None:
    known = "" if findings.given.num_ranks is not None else f" (with {ranks} {'rank' if ranks == 1 else 'ranks'})"
    words = ("samples a step on all ranks", "samples of one backward on one rank", "backward passes a step")
    for key, size, word in zip(BATCH_KEYS, sizes, words, strict=True):
        there = getattr(findings.config, key) is not None
        findings.note(key, f"{size} {word}{'' if there else known}")


def _leave_open(findings: Findings) -> None:
    written = [key.written for key in findings.keys if key.path in BATCH_KEYS[:2]]
    for path in written or ["train_micro_batch_size_per_gpu"]:
        said = '"auto", and nothing fills it in' if written else "missing, and train_batch_size is not there either"
        findings.open[path] = f"{said}: give micro_batch"


def _named(findings: Findings) -> str:
    """The first of the three keys that was written."""
    return next((key.written for key in findings.keys if key.path in BATCH_KEYS), BATCH_KEYS[0])


def _mismatch(train: int, micro: int, accumulation: int, ranks: int) -> str:
    product = micro * accumulation * ranks
    return (
        f"{train} samples a step are not micro batch {micro} x accumulation {accumulation} x {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} = {product}; leave one of the three out, or make "
        f"train_batch_size {product}"
    )
