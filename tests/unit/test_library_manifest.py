"""A folder of skills is read strictly: every fault names its file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvnotes.errors import TemplateError
from kvnotes.library import Folder, read_folder

ROOT = Path(__file__).resolve().parents[2]


def folder_of(path: Path, manifest: str, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "kvnotes.toml").write_text(manifest, encoding="utf-8")
    for name, text in files.items():
        (path / name.replace("_md", ".md").replace("_json", ".json")).write_text(text)
    return path


def read(path: Path, manifest: str, **files: str) -> Folder:
    return read_folder(folder_of(path, manifest, **files))


def test_example_folder_is_read() -> None:
    skills = {skill.name: skill for skill in read_folder(ROOT / "examples" / "skills").skills}
    assert set(skills) == {"base", "refunds", "shipping", "tool/get_order", "tool/cancel_order"}
    assert skills["refunds"].preamble == skills["base"].text
    assert dict(skills["shipping"].variants) == {"tier": ("standard", "gold")}
    assert skills["tool/get_order"].is_tool


def test_every_key_of_a_skill_arrives(tmp_path: Path) -> None:
    skill = read(
        tmp_path,
        """
        [skills."team/refunds"]
        file = "r.md"
        version = 7
        role = "user"
        preamble = "tier {{tier}}"
        compile = "lazy"
        description = "what"
        [skills."team/refunds".fields]
        days = "30"
        [skills."team/refunds".variants]
        tier = ["gold", "silver"]
        """,
        r_md="\ufeffwithin {{days}}\r\n",
    ).skills[0]
    assert skill.ref == "team/refunds@7" and skill.role == "user" and skill.compile == "lazy"
    assert skill.text == "within {{days}}\n", "byte order mark and line ends are normalised"
    assert skill.preamble == "tier {{tier}}" and skill.description == "what"
    assert dict(skill.fields) == {"days": "30"}
    assert dict(skill.variants) == {"tier": ("gold", "silver")}


def test_manifest_itself_may_be_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, '[skills.a]\ntext = "x"')
    assert read_folder(folder / "kvnotes.toml") == read_folder(folder)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ("", "names no skills"),
        ("[skills.a]\ntext = ", "is not TOML"),
        ('[skill.a]\ntext = "x"', "skill: unknown key"),
        ('[skills.a]\ntxt = "x"', "skills.a.txt: unknown key"),
        ('[tools.a]\nschema = "x"', "tools.a.file"),
        ("[skills.a]", "needs either file or text"),
        ('[skills.a]\ntext = "x"\nfile = "a.md"', "needs either file or text"),
        ('[skills.a]\nfile = "none.md"', "skills.a: cannot read .*none.md"),
        ('[skills.a]\nfile = "../secret.md"', "lies outside of"),
        ('[skills.a]\nfile = "/etc/hostname"', "lies outside of"),
        ('[skills.a]\ntext = "x"\nversion = 0', "skills.a.version"),
        ('[skills.a]\ntext = "x"\nversion = "1"', "skills.a.version"),
        ('[skills.a]\ntext = "x"\nrole = "boss"', "skills.a.role"),
        ('[skills."a b"]\ntext = "x"', "skills.a b: skill name"),
        ('[skills.a]\ntext = "{{x"', "skills.a: .*{{x"),
        ('[skills.a]\ntext = "x"\nafter = "b"', "skills.a.after names the skill 'b'"),
        ('[skills.a]\ntext = "x"\nafter = "a"\npreamble = "y"', "both after and preamble"),
        (
            '[skills.b]\ntext = "x"\nrole = "user"\n[skills.a]\ntext = "x"\nafter = "b"',
            "not a system message of its own",
        ),
        (
            '[skills.a]\ntext = "x"\n[skills.a.variants]\ntier = ["gold"]',
            "variants of the field 'tier'",
        ),
        ('[skills.a]\ntext = "x"\n[skills.a.fields]\nf = 1', "skills.a.fields.f"),
        ('[tools.f]\nfile = "t.json"', "tools.f: .* is of the tool 'g'"),
        ('[tools.f]\nfile = "bad.json"', "tools.f: bad.json is not JSON"),
    ],
)
def test_fault_is_named_with_file_and_key(tmp_path: Path, manifest: str, says: str) -> None:
    (tmp_path / "secret.md").write_text("secret")
    folder = folder_of(tmp_path / "skills", manifest, t_json='{"name": "g"}', bad_json="{")
    with pytest.raises(TemplateError, match=says) as caught:
        read_folder(folder)
    assert "kvnotes.toml" in str(caught.value) and caught.value.hint


def test_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.md").write_text("secret")
    folder = folder_of(tmp_path / "skills", '[skills.a]\nfile = "link.md"')
    (folder / "link.md").symlink_to(tmp_path / "secret.md")
    with pytest.raises(TemplateError, match="lies outside of"):
        read_folder(folder)


def test_folder_without_a_manifest_shows_how_to_write_one(tmp_path: Path) -> None:
    (tmp_path / "policy.md").write_text("x")
    with pytest.raises(TemplateError, match=r"has no kvnotes\.toml") as caught:
        read_folder(tmp_path)
    assert 'file = "policy.md"' in caught.value.hint


def test_text_that_is_no_utf8_or_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, '[skills.a]\nfile = "a.md"')
    (folder / "a.md").write_bytes(b"abc\xff")
    with pytest.raises(TemplateError, match="byte 3 is 0xff"):
        read_folder(folder)
    monkeypatch.setattr("kvnotes.library.manifest.MAX_FILE_NBYTES", 100)
    (folder / "a.md").write_text("x" * 101)
    with pytest.raises(TemplateError, match="has more than"):
        read_folder(folder)
