"""Versions of versions.json that must fit each other, as its `relations` say."""

from __future__ import annotations

from .findings import Finding
from .sites import same_version
from .source import FILE, Versions


def check_ties(versions: Versions) -> list[Finding]:
    """Names whose value does not begin with, or equal, that of the name that they are tied to."""
    findings = []
    for name, variable in versions.variables.items():
        relation = versions.relation(name)
        place = (FILE, variable.line, 0)
        if relation.extends and relation.extends in versions:
            base = versions[relation.extends]
            if variable.value != base and not variable.value.startswith(f"{base}."):
                said = f"{name} is {variable.value}, which does not begin with {base} ({relation.extends})"
                findings.append(Finding(*place, said, "tie"))
        if relation.same_as and relation.same_as in versions:
            other = versions[relation.same_as]
            if not same_version(variable.value, other):
                said = f"{name} is {variable.value}, {relation.same_as} is {other}; they move together"
                findings.append(Finding(*place, said, "tie"))
    return findings
