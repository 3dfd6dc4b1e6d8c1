"""A reader of Dockerfile ARGs that agrees with BuildKit. Pure: text in, values out; imports nothing else of ours.

lines.py     text -> instructions: directives, continuations, comments, heredocs, line numbers
words.py     one word: quotes, escapes, `$name` and `${name...}`; splitting.py: into words; patterns.py: the patterns
scopes.py    instructions -> ARGs with their values: global, per stage, inherited; layers.py: what a name means in one
rules.py     whose rules

BuildKit's answer depends, in odd corners, on the version of its Dockerfile frontend; `Frontend` names it, and every
such corner is one comparison with it. Where the engine tests find a disagreement, BuildKit is right.
"""

from __future__ import annotations

from .lines import Heredoc, Instruction, Problem, split_instruction
from .rules import ENGINE, NEWEST, BadWord, Frontend, named_by
from .scopes import Arg, Dockerfile, Stage, read
from .splitting import SPACE, Word, split
from .words import Style, expand

__all__ = [
    "ENGINE", "NEWEST", "SPACE", "Arg", "BadWord", "Dockerfile", "Frontend", "Heredoc", "Instruction", "Problem",
    "Stage", "Style", "Word", "expand", "named_by", "read", "split", "split_instruction",
]  # fmt: skip
