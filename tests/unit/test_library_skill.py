"""Skills and the catalogue: names, versions, records that never change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvnotes.errors import TemplateError, TrustError, UnknownSegmentError
from kvnotes.library import Catalog, Skill, parse_ref
from kvnotes.store import Trust

REFUNDS = Skill("refunds", "Refund within {{days}} days.", fields=(("days", "30"),))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "library")


@pytest.mark.parametrize("name", ["refunds", "tool/get_order", "a.b-c_d", "_x", "9lives"])
def test_names_that_are_names(name: str) -> None:
    assert parse_ref(Skill(name, "text").name) == (name, 0)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", "../up", "/abs", "a/", "a//b", "a b", "a@1", "-x", "a/.b", "ü"]
)
def test_names_that_could_leave_the_folder_or_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="skill name"):
        Skill(name, "text")


def test_a_reference_names_a_version_or_the_latest() -> None:
    assert parse_ref("refunds@3") == ("refunds", 3)
    assert parse_ref("tool/get_order") == ("tool/get_order", 0)
    for wrong in ("refunds@", "refunds@x", "@3", "refunds@3@4"):
        with pytest.raises(TemplateError, match="names no skill"):
            parse_ref(wrong)


def test_versions_are_given_by_content(catalog: Catalog) -> None:
    assert catalog.add(REFUNDS).ref == "refunds@1"
    assert catalog.add(REFUNDS).ref == "refunds@1"
    longer = Skill("refunds", "Refund within {{days}} days, or not.", fields=(("days", "30"),))
    assert catalog.add(longer).ref == "refunds@2"
    assert catalog.add(REFUNDS).ref == "refunds@3", "the latest is what a text is compared with"
    assert catalog.get("refunds") == catalog.get("refunds@3")
    assert catalog.versions("refunds") == [1, 2, 3]


def test_preview_says_what_add_would_and_adds_nothing(catalog: Catalog) -> None:
    assert catalog.preview(REFUNDS).ref == "refunds@1"
    assert catalog.skills() == []


def test_a_version_never_changes_its_text(catalog: Catalog) -> None:
    catalog.add(Skill("refunds", "a", 3))
    assert catalog.add(Skill("refunds", "a", 3)).ref == "refunds@3"
    for other in (Skill("refunds", "b", 3), Skill("refunds", "a", 3, role="user")):
        with pytest.raises(TemplateError, match="version 3 of skill 'refunds' is there already"):
            catalog.add(other)
    assert catalog.get("refunds@3").text == "a"


def test_every_part_of_a_skill_but_its_version_is_its_content() -> None:
    base = Skill("s", "text {{f}}", preamble="{{t}}", fields=(("f", "x"), ("t", "y")))
    others = [
        Skill("s", "text {{f}}!", preamble="{{t}}", fields=base.fields),
        Skill("s", "text {{f}}", preamble="{{t}}!", fields=base.fields),
        Skill("s", "text {{f}}", preamble="{{t}}", fields=(("f", "z"), ("t", "y"))),
        Skill("s", "text {{f}}", preamble="{{t}}", fields=base.fields, role="user"),
        Skill(
            "s",
            "text {{f}}",
            preamble="{{t}}",
            fields=base.fields,
            variants=(("t", ("y", "z")),),
        ),
    ]
    assert len({skill.digest for skill in (base, *others)}) == 6
    assert Skill("s", "x", 1).digest == Skill("s", "x", 2).digest


def test_skills_with_a_slash_are_listed_under_their_own_name(catalog: Catalog) -> None:
    catalog.add(Skill("tool/get_order", "x"))
    catalog.add(Skill("tool", "y"))
    assert [skill.ref for skill in catalog.skills()] == ["tool@1", "tool/get_order@1"]
    assert catalog.versions("tool") == [1]


def test_unknown_skill_and_version_name_the_nearest(catalog: Catalog) -> None:
    with pytest.raises(UnknownSegmentError) as caught:
        catalog.get("refunds")
    assert "kvnotes compile" in caught.value.hint
    catalog.add(REFUNDS)
    with pytest.raises(UnknownSegmentError) as caught:
        catalog.get("refund")
    assert caught.value.hint == "did you mean 'refunds'?"
    with pytest.raises(UnknownSegmentError, match="no version 9, it has 1"):
        catalog.get("refunds@9")


def test_removed_version_is_gone_and_the_others_stay(catalog: Catalog) -> None:
    catalog.add(Skill("s", "a"))
    catalog.add(Skill("s", "b"))
    assert catalog.remove("s@1").text == "a"
    assert catalog.versions("s") == [2]
    with pytest.raises(UnknownSegmentError):
        catalog.remove("s@1")


def test_damaged_changed_and_renamed_records_are_refused(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add(REFUNDS)
    path = tmp_path / "library" / "refunds" / "1.json"
    whole = path.read_bytes()
    for broken in (whole[:-5], b"[]", b"[" * 100_000, whole.replace(b"30", b"90")):
        path.write_bytes(broken)
        with pytest.raises(TemplateError):
            catalog.get("refunds")
    path.write_bytes(whole)
    path.rename(path.with_name("7.json"))
    with pytest.raises(TemplateError, match="that of 'refunds@1'"):
        catalog.get("refunds@7")


def test_records_are_encrypted_where_the_store_encrypts(tmp_path: Path) -> None:
    secret = Catalog(tmp_path, Trust(encryption_key=b"k" * 32))
    secret.add(REFUNDS)
    content = (tmp_path / "refunds" / "1.json").read_bytes()
    assert b"Refund" not in content and b"refunds" not in content
    assert secret.get("refunds").text == REFUNDS.text
    with pytest.raises(TrustError):
        Catalog(tmp_path).get("refunds")


def test_tool_is_a_skill_whatever_order_its_keys_have() -> None:
    schema = {"name": "f", "description": "d", "parameters": {"type": "object", "a": 1, "b": 2}}
    other = json.loads(
        json.dumps({"type": "function", "function": dict(reversed(list(schema.items())))})
    )
    assert Skill.of_tool(schema).digest == Skill.of_tool(other).digest
    assert Skill.of_tool(schema).ref == "tool/f"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"role": "boss"}, "has the role 'boss'"),
        ({"version": -1}, "has version -1"),
        ({"fields": (("nope", "x"),)}, "value for 'nope'"),
        ({"variants": (("days", ()),)}, "has the variants"),
        ({"variants": (("days", ("1", "1")),)}, "has the variants"),
    ],
)
def test_skill_that_cannot_be_is_refused_with_both_sides(
    changes: dict[str, object], says: str
) -> None:
    facts = {"name": "s", "text": "{{days}}", **changes}
    with pytest.raises(TemplateError, match=says):
        Skill(**facts)  # type: ignore[arg-type]
