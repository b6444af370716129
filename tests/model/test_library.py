"""Compiling a library: incremental, per model, variants as families, shared between machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_session import FEW, gap_to_mask, tiny_model

from kvnotes import Session
from kvnotes.errors import PlanError, StorageError, TemplateError, UnknownSegmentError
from kvnotes.fidelity import MECHANICAL_TOLERANCE
from kvnotes.library import Library, Skill, compile_units, plan_compile
from kvnotes.library.recompute import recompute, text_agrees
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.session import Model
from kvnotes.store import KVStore, Remote

POLICY = "Never sell below the price. " * 8
TIERED = Skill(
    "tiered",
    "Gold customers wait one day, others wait {{days}} days. " * 4,
    preamble="tier: {{tier}}\n",
    fields=(("days", "five"),),
    variants=(("tier", ("gold", "silver", "none")),),
)


def model_on(folder: Path, family: str = "smollm2", **options: object) -> Model:
    tiny = tiny_model(family)
    return Model(tiny.engine, tiny.tokenizer, tiny.name, KVStore(folder, **options))  # type: ignore[arg-type]


def compiled(model: Model, *skills: Skill, **options: int) -> list[str]:
    """Compile skills; return the names of what was compiled."""
    plan = plan_compile(model, [Library(model.store).add(skill) for skill in skills])
    done = compile_units(model, plan.missing, **options)
    return sorted(f"{one.unit.skill.name} {one.unit.variant}".strip() for one in done)


def test_second_compile_does_nothing_and_a_changed_text_only_its_own(tmp_path: Path) -> None:
    first, second = Skill("a", POLICY), Skill("b", "Other rules hold. " * 8)
    assert compiled(model_on(tmp_path), first, second) == ["a", "b"]
    assert compiled(model_on(tmp_path), first, second) == []
    assert compiled(model_on(tmp_path), Skill("a", POLICY + "More."), second) == ["a"]


def test_another_model_compiles_its_own(tmp_path: Path) -> None:
    skill = Skill("a", POLICY)
    assert compiled(model_on(tmp_path), skill) == ["a"]
    assert compiled(model_on(tmp_path, "llama3"), skill)[:1] == ["a"]
    entries = Library(KVStore(tmp_path)).shelf("a").entries
    assert len({entry.fingerprint for entry in entries}) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_variants_are_compiled_whatever_the_number_of_workers(tmp_path: Path, workers: int) -> None:
    names = compiled(model_on(tmp_path), TIERED, workers=workers)
    assert names == ["tiered tier=gold", "tiered tier=none", "tiered tier=silver"]


def test_compiled_skill_is_spliced_by_a_session_without_compiling(tmp_path: Path) -> None:
    compiled(model_on(tmp_path), Skill("a", POLICY), TIERED)
    model = model_on(tmp_path)
    library = Library(model.store)
    session = Session(
        model,
        messages=[library.get("a").message(), library.get("tiered").message()],
        segments=library.segments("a", "tiered"),
        fields={"tier": "gold", "days": "five"},
        splice="always",
    )
    turn = session.user("hello?", decide=["yes", "no"])
    assert model.store.counters.compiled == 0
    assert turn.plan.tokens.reused + turn.plan.tokens.moved > 0.5 * turn.plan.tokens.total
    assert gap_to_mask(session) < MECHANICAL_TOLERANCE["float32"]


def test_variants_are_one_family_and_their_text_is_stored_once(tmp_path: Path) -> None:
    model = model_on(tmp_path)
    compiled(model, TIERED)
    entries = Library(model.store).shelf("tiered").entries
    assert len(entries) == 3 and len({entry.family for entry in entries}) == 1
    headers = [model.store.header(entry.key) for entry in entries]
    assert all(header is not None and header.provenance.text == "" for header in headers)
    texts = {model.store.text(header) for header in headers if header is not None}
    assert len(texts) == 1 and "wait five days" in str(texts.pop())
    assert len(list((tmp_path / "texts").iterdir())) == 1


def test_family_is_pinned_and_removed_as_one(tmp_path: Path) -> None:
    library = Library(model_on(tmp_path).store)
    compiled(model_on(tmp_path), TIERED)
    assert library.pin("tiered").pinned
    assert len(library.store.pinned()) == 1
    assert not library.pin("tiered", False).pinned
    freed = library.remove("tiered")
    assert freed > 0 and library.store.entries() == []
    with pytest.raises(UnknownSegmentError):
        library.shelf("tiered")


def test_lazy_variant_is_compiled_on_its_first_use(tmp_path: Path) -> None:
    lazy = Skill(
        "lazy",
        TIERED.text,
        preamble=TIERED.preamble,
        fields=TIERED.fields,
        variants=TIERED.variants,
        compile="lazy",
    )
    model = model_on(tmp_path)
    assert compiled(model, lazy) == ["lazy tier=gold"]
    skill = Library(model.store).get("lazy")
    session = Session(
        model,
        messages=[skill.message(), {"role": "system", "content": "tier is {{tier}}"}],
        segments={skill.ref: skill.segment},
        fields={"tier": "gold", "days": "five"},
        splice="always",
    )
    session.user("hello?", decide=["yes", "no"])
    session.edit(tier="silver", strategy="swap")
    turn = session.user("and now?", decide=["yes", "no"])
    assert "no variant tier=silver yet" in str(turn.fallback_reason)
    names = {entry.variant for entry in Library(model.store).shelf("lazy").entries}
    assert names == {"tier=gold", "tier=silver"}


def test_cost_of_a_product_is_known_before_and_too_many_are_refused(tmp_path: Path) -> None:
    wide = Skill(
        "wide",
        "Rules follow. " * 5,
        preamble="{{a}} {{b}}\n",
        variants=(("a", tuple("12345")), ("b", tuple("123456"))),
    )
    model = model_on(tmp_path)
    plan = plan_compile(model, [wide])
    cost = plan.costs[0]
    spec = model.engine.spec
    nbytes = sum(len(unit.span.token_ids) for unit in plan.units) * spec.nbytes_per_token(4)
    assert (cost.num_variants, cost.nbytes) == (30, nbytes) and cost.predicted_ms > 0
    assert model.store.counters.compiled == 0
    with pytest.raises(PlanError, match=r"a\(5\) x b\(6\) = 30 variants of \d+ tokens: .* MB"):
        plan_compile(model, [wide], max_variants=29)


def test_field_without_a_value_waits_for_its_first_use(tmp_path: Path) -> None:
    plan = plan_compile(model_on(tmp_path), [Skill("open", "State {{state}}.")])
    assert plan.units == () and "'state' has no value" in plan.costs[0].skipped


def test_dependency_is_compiled_behind_its_preamble_and_stays_exact_there(tmp_path: Path) -> None:
    base = Skill("base", "You help customers of a shop. " * 4)
    after = Skill("after", POLICY, preamble=base.text)
    model = model_on(tmp_path)
    compiled(model, base, after)
    library = Library(model.store)
    session = Session(
        model,
        messages=[library.get("base").message(), library.get("after").message()],
        segments=library.segments("base", "after"),
    )
    session.user("hello?", decide=["yes", "no"])
    assert session.exact, "behind exactly its preamble a segment is what a prefill computes"


def test_int8_copy_is_a_file_of_its_own_and_is_used_only_when_asked_for(tmp_path: Path) -> None:
    model = model_on(tmp_path)
    skill = Library(model.store).add(Skill("a", POLICY))
    plan = plan_compile(model, [skill], int8=True)
    list(compile_units(model, plan.missing, int8=True))
    assert plan_compile(model, [skill], int8=True).missing == ()
    assert len(plan_compile(model, [skill]).missing) == len(plan.units)
    run = plan.units[0].run
    assert model_on(tmp_path).store.find(model.engine.identity, run) is None
    rounded = KVStore(tmp_path, accept_inexact=True).find(model.engine.identity, run)
    assert rounded is not None and rounded.run.altered == "int8:float32"
    header = model.store.header(Library(model.store).shelf("a").entries[0].key)
    assert header is not None
    result = recompute(model.engine, rounded, stated_error=header.payload.max_error)
    assert result.agreed and 1e-4 < result.max_gap <= header.payload.max_error


# -- computing a foreign file again ---------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.3])
@pytest.mark.parametrize("preamble", ["", "You are kind.\n"])
def test_honest_segment_agrees(tmp_path: Path, share: float | None, preamble: str) -> None:
    model = model_on(tmp_path)
    compiled(model, Skill("a", POLICY, preamble=preamble))
    segment = model.store.get(Library(model.store).shelf("a").entries[0].key)
    assert segment is not None
    result = recompute(model.engine, segment, share=share, seed=1)
    assert result.agreed, result
    expected = segment.num_tokens if share is None else 0.2 * segment.num_tokens
    assert result.num_checked >= expected


def _altered(segment: KVSegment, layer: int, position: int) -> KVSegment:
    values = [tensor.clone() for tensor in segment.values]
    values[layer][0, position] += values[layer].abs().max()
    return KVSegment(
        segment.run,
        segment.identity,
        {"keys": segment.keys, "values": tuple(values)},
        preamble_ids=segment.preamble_ids,
    )


@pytest.mark.parametrize("layer", [0, 3])
def test_token_whose_values_say_something_else_is_found(tmp_path: Path, layer: int) -> None:
    engine = tiny_model().engine
    honest = engine.compile(tuple(range(40, 100)))
    hostile = _altered(honest, layer, 37)
    result = recompute(engine, hostile)
    assert not result.agreed and (result.layer, result.position) == (layer, 37)
    found = [not recompute(engine, hostile, share=0.5, seed=seed).agreed for seed in range(20)]
    assert any(found), "a half of the tokens is looked at each time"


def test_sampled_places_cannot_be_foreseen() -> None:
    engine = tiny_model().engine
    segment = engine.compile(tuple(range(40, 140)))
    hostile = _altered(segment, 0, 99)
    found = {recompute(engine, hostile, share=0.3).agreed for _ in range(30)}
    assert found == {True, False}


def test_segment_of_another_text_is_found() -> None:
    engine = tiny_model().engine
    honest, other = engine.compile(tuple(range(40, 100))), engine.compile(tuple(range(41, 101)))
    swapped = KVSegment(honest.run, honest.identity, other.tensors)
    assert not recompute(engine, swapped, share=0.2, seed=0).agreed


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_share_that_is_none_is_refused(share: float) -> None:
    engine = tiny_model().engine
    with pytest.raises(PlanError, match="share"):
        recompute(engine, engine.compile((50, 51)), share=share)


def test_text_of_a_file_must_have_its_tokens(tmp_path: Path) -> None:
    model = model_on(tmp_path)
    compiled(model, Skill("a", POLICY))
    header = model.store.header(Library(model.store).shelf("a").entries[0].key)
    assert header is not None
    text = model.store.text(header)
    assert text_agrees(header, text, model.tokenizer) is True
    assert text_agrees(header, f"{text}x", model.tokenizer) is False
    assert text_agrees(header, None, model.tokenizer) is None
    assert text_agrees(header, text, tiny_model("llama3").tokenizer) is None


# -- other machines -------------------------------------------------------------------------


def test_skill_travels_with_its_segments_and_texts(tmp_path: Path) -> None:
    model = model_on(tmp_path / "a", remote=Remote(str(tmp_path / "remote")))
    compiled(model, TIERED)
    assert Library(model.store).push("tiered") == 3
    assert Library(model.store).push("tiered") == 0
    other = model_on(tmp_path / "b", remote=str(tmp_path / "remote"))
    shelf = Library(other.store).pull("tiered")
    assert shelf.skill == Library(model.store).get("tiered")
    assert {entry.variant for entry in shelf.entries} == {"tier=gold", "tier=silver", "tier=none"}
    header = other.store.header(shelf.entries[0].key)
    assert header is not None and "wait five days" in str(other.store.text(header))
    assert compiled(other, TIERED) == []
    assert other.store.counters.compiled == 0


def test_pull_takes_only_the_segments_of_a_model_if_asked(tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    for family in ("smollm2", "llama3"):
        model = model_on(tmp_path / "a", family, remote=remote)
        compiled(model, Skill("a", POLICY))
    Library(model.store).push("a")
    wanted = tiny_model("smollm2").engine.fingerprint
    library = Library(KVStore(tmp_path / "b", remote=remote))
    assert {e.fingerprint for e in library.pull("a", fingerprint=wanted).entries} == {wanted}


def test_latest_version_is_pulled_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    model = model_on(tmp_path / "a", remote=remote)
    library = Library(model.store)
    for text in (POLICY, POLICY + "More."):
        compiled(model, Skill("a", text))
    library.push("a@1")
    library.push("a@2")
    other = Library(KVStore(tmp_path / "b", remote=remote))
    assert other.pull("a").skill.version == 2
    for ref in ("a@9", "b"):
        with pytest.raises(UnknownSegmentError, match="has no skill"):
            other.pull(ref)


def test_pulled_version_does_not_replace_another_text_here(tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    model = model_on(tmp_path / "a", remote=remote)
    compiled(model, Skill("a", POLICY))
    Library(model.store).push("a")
    other = Library(KVStore(tmp_path / "b", remote=remote))
    other.add(Skill("a", "something else"))
    with pytest.raises(TemplateError, match="version 1 of skill 'a' is there already"):
        other.pull("a@1")
    assert other.get("a@1").text == "something else"


def test_tenants_have_catalogues_of_their_own(tmp_path: Path) -> None:
    store = KVStore(tmp_path)
    mine, theirs = (Library(store.for_tenant(name)) for name in ("mine", "theirs"))
    mine.add(Skill("secret", POLICY))
    assert [shelf.skill.name for shelf in mine.shelves()] == ["secret"]
    assert theirs.shelves() == [] == Library(store).shelves()


def test_library_needs_a_folder() -> None:
    with pytest.raises(StorageError, match="needs a store with a folder"):
        Library(KVStore())


def test_generation_with_a_loaded_skill_equals_that_with_a_compiled_one(tmp_path: Path) -> None:
    compiled(model_on(tmp_path), Skill("a", POLICY))
    texts = []
    for model in (model_on(tmp_path), tiny_model()):
        skill = Skill("a", POLICY, 1)
        session = Session(model, messages=[skill.message()], segments={skill.ref: skill.segment})
        texts.append(session.user("hello?", generate=FEW).token_ids)
    assert texts[0] == texts[1]


def test_run_of_a_unit_is_what_the_store_finds(tmp_path: Path) -> None:
    model = model_on(tmp_path)
    unit = plan_compile(model, [Skill("a", POLICY)]).units[0]
    assert unit.run == Run(unit.span.token_ids)
    list(compile_units(model, [unit]))
    found = model.store.find(model.engine.identity, unit.run)
    own = model.engine.compile(unit.span.token_ids)
    assert found is not None and all(map(torch.equal, found.keys, own.keys))
