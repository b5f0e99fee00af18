"""Arguments of the scripts that submit jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from holdfast.core.batches import fresh_batches
from holdfast.core.models import NewJob, Step, UniqueKey
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.encoding import expiry_text, partition_field, span_us, spec_text, when_text

_common = attrgetter("priority", "max_attempts", "queue", "task", "delay", "run_at_us")
_id_and_payload = attrgetter("id", "payload")
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode


def choose_script(jobs: Sequence[NewJob], *, confirmed: bool) -> str:
    """Returns the fastest script for these jobs. ``confirmed``: not ``submit_one``, which may answer "nothing yet"."""
    if any(job.has_extras or job.partition is not None or job.has_client_id for job in jobs):
        return "submit"
    is_one = not confirmed and len(jobs) == 1 and jobs[0].delay is None and jobs[0].run_at_us is None
    return "submit_one" if is_one else "submit_fast"


def encode_stages(
    parts: Sequence[Sequence[NewJob]], script: str, aliases: Mapping[str, str], *, in_one_piece: bool
) -> Iterator[list[list[Argument]]]:
    """Yields arguments of this script for parts that are sent together. A part that waits for earlier jobs with keys,
    or is the last after a batch, comes once those before are answered. ``aliases``: jobs answered for others."""
    batches, keyed = set[str](), set[str]()
    stage: list[list[Argument]] = []
    if script == "submit_one":
        ((job,),) = parts
        stage = [[job.id, spec_text(job), job.queue, job.priority, job.payload, "1" if in_one_piece else "0"]]
    elif script == "submit_fast":
        stage = [encode_fast_submission(part, in_one_piece=in_one_piece) for part in parts]
    for part in parts if script == "submit" else ():
        is_last = part is parts[-1]
        if (batches and is_last) or any(each.job_id in keyed for job in part for each in job.after):
            yield stage
            keyed, stage = set(), []
        encode = partial(encode_submission, in_one_piece=in_one_piece, aliases=aliases, is_last=is_last)
        stage.append(encode(part, earlier_batches=batches))
        batches.update(job.id for job in part if job.is_batch)
        keyed.update(job.id for job in part if job.key is not None or job.unique is not None)
    yield stage


def encode_submission(
    jobs: Sequence[NewJob],
    aliases: Mapping[str, str],
    *,
    in_one_piece: bool,
    earlier_batches: Iterable[str] = (),
    is_last: bool = False,
    only_checks: bool = False,
) -> list[Argument]:
    """Jobs as arguments of ``submit``. Invalid for values that Redis cannot hold exactly. ``aliases``: see
    ``encode_stages``. ``earlier_batches``: of the same submission, in earlier parts; ``is_last``: they get no more
    members or callbacks. ``only_checks``: stores nothing."""
    batches = {*earlier_batches}
    specs: dict[str, int] = {}
    rest: list[Argument] = []
    group: tuple[int, str, str] | None = None  # what consecutive jobs have in common, and where their number is
    number_at = 0
    for job in jobs:
        spec = specs.setdefault(spec_text(job), len(specs) + 1)
        common = spec, when_text(job), partition_field(job.partition, job.weights)
        if not (job.has_extras or job.has_client_id):
            if common != group:
                group, number_at = common, len(rest)
                rest += (0, *common, "")
            rest[number_at] += 1  # type: ignore[operator]
            rest += (job.id, job.payload)
            continue
        group = None
        key = "" if job.key is None else "=" + job.key
        key_for = "" if job.key_for is None else f"={span_us(job.key_for)}"
        options = b"" if job.options is None else b"=" + _encode(job.options)
        rest += (1, *common, "extended", job.id, job.payload, key, key_for, options, "1" if job.has_client_id else "")
        rest.append("" if job.unique is None else _unique_text(job.unique))
        rest.append(expiry_text(job))
        rest.append(_dependencies(job, aliases) if job.after else "")
        rest.append(("*" if job.is_batch else "") + ("+" if job.batch in batches else "") + (job.batch or ""))
        if job.is_batch:
            batches.add(job.id)
        rest.append(_steps_text(job.first_steps) if job.first_steps else "")
    complete = batches if is_last else ()
    flags = ("1" if in_one_piece else "0") + ("c" if only_checks else "")
    flags += "a" if any(job.after for job in jobs) else ""
    flags += "b" if complete or any(job.is_batch or job.batch for job in jobs) else ""
    return [" ".join([flags, *complete]), len(specs), *specs, *rest]


def encode_fast_submission(jobs: Sequence[NewJob], *, in_one_piece: bool) -> list[Argument]:
    """Jobs as arguments of ``submit_fast``."""
    specs: dict[str, int] = {}
    rest: list[Argument] = []
    for _, alike in groupby(jobs, _common):
        group = list(alike)
        spec = specs.setdefault(spec_text(group[0]), len(specs) + 1)
        rest += (len(group), spec, when_text(group[0]), "", "", *chain.from_iterable(map(_id_and_payload, group)))
    return ["1" if in_one_piece else "0", len(specs), *specs, *rest]


def _steps_text(steps: Sequence[Step]) -> bytes:
    """Name and text of each step, as the scripts write them."""
    found = []
    for step in steps:
        head = f"{step.number} {int(step.is_ordered)} {step.claims} {step.ended_at_us}"
        found += [step.name, f"{head}\n" + ("" if step.result is None else f"={step.result}")]
    return _pack(found)


def find_related(jobs: Sequence[NewJob]) -> list[NewJob]:
    """Batches and their members, unless new, and jobs that wait for others than earlier ones of their submission."""
    new, earlier, found = {*fresh_batches(jobs), None}, set[str](), []
    for job in jobs:
        after = tuple(each for each in job.after if each.job_id not in earlier)
        if after or not new.issuperset((job.batch, job.id if job.is_batch else None)):
            found.append(replace(job, payload="", after=after, first_steps=()))
        earlier.add(job.id)
    return found


def _dependencies(job: NewJob, aliases: Mapping[str, str]) -> bytes:
    """Id and condition of each dependency, and "1" if its key was answered: the job may be gone."""
    ids = [(aliases.get(each.job_id, each.job_id), each) for each in job.after]
    return _pack([text for job_id, each in ids for text in (job_id, each.on, "1" if each.job_id in aliases else "")])


def _unique_text(unique: UniqueKey) -> str:
    """A unique key as the scripts take it."""
    window = "-" if unique.window_us is None else unique.window_us
    return f"{unique.on_conflict} {unique.during or '-'} {window} {unique.key}"
