"""Skills: named, versioned texts, compiled once and used in any conversation.

`manifest` reads a folder of them, `catalog` keeps their versions, `compiling` makes
segments of them, `library` is the facade.
"""

from kvnotes.library.catalog import Catalog
from kvnotes.library.compiling import (
    DEFAULT_MAX_VARIANTS,
    Compiled,
    CompilePlan,
    SkillCost,
    Unit,
    compile_units,
    plan_compile,
)
from kvnotes.library.library import Library, Shelf
from kvnotes.library.manifest import Folder, read_folder
from kvnotes.library.skill import Skill, parse_ref

__all__ = [
    "DEFAULT_MAX_VARIANTS",
    "Catalog",
    "CompilePlan",
    "Compiled",
    "Folder",
    "Library",
    "Shelf",
    "Skill",
    "SkillCost",
    "Unit",
    "compile_units",
    "parse_ref",
    "plan_compile",
    "read_folder",
]
