"""No text that is allowed is invalid, by the JSON Schema Test Suite and by what can be said in its schemas.

``json_schema_test_suite/cases.jsonl`` holds all schemas of json-schema-org/JSON-Schema-Test-Suite (commit 44401e0,
drafts 7 and 2020-12 with what is optional), one a line, with their instances and whether these are valid.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen
from jsonschema import ValidationError
from schemas import JUDGES, random_text
from test_compiler import BYTES, accepts

from paged_sdk import Constraint, ConstraintError
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.grammar import Grammar
from paged_sdk.constraints.schema_parts import schemas_in

_PATH: Final = Path(__file__).parent / "json_schema_test_suite" / "cases.jsonl"
_DRAFTS: Final = {7: "http://json-schema.org/draft-07/schema#", 2020: "https://json-schema.org/draft/2020-12/schema"}


@frozen(eq=False)
class Case:
    """Holds a schema of the suite.

    :ivar name: file and description
    :ivar grammar: None if it is refused
    :ivar refusal: the keyword that is the reason
    """

    draft: int
    name: str
    schema: Any
    instances: list[tuple[Any, bool]]
    grammar: Grammar | None
    refusal: str


@cache
def cases() -> list[Case]:
    compiler, found = GrammarCompiler(lambda: BYTES), []
    for line in _PATH.read_text(encoding="utf-8").splitlines():
        read = json.loads(line)
        for draft in read["drafts"]:
            schema = read["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": _DRAFTS[draft], **schema}
            grammar, refusal = None, ""
            try:
                grammar = compiler.compile(Constraint.json_schema(json.dumps(schema)))
            except ConstraintError as error:
                refusal = error.keyword
                assert refusal, (schema, error)
            instances = [(value, valid) for value, valid in read["instances"]]
            found.append(Case(draft, f"{read['file']}: {read['about']}", schema, instances, grammar, refusal))
    return found


def test_no_invalid_instance_is_allowed_and_every_refusal_names_a_keyword() -> None:
    allowed: Counter[bool] = Counter()
    wrong = []
    for case in cases():
        for value, is_valid in case.instances if case.grammar is not None else ():
            texts = {json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)}
            if any(accepts(case.grammar, text) for text in texts if case.grammar is not None):
                allowed[is_valid] += 1
                if not is_valid:
                    wrong.append((case.name, case.schema, value))
    assert wrong == []
    assert allowed[True] >= 1000
    assert sum(case.grammar is not None for case in cases()) >= 400


def test_random_texts_of_the_suites_schemas_are_valid() -> None:
    assert judge_texts(2) >= 500


@pytest.mark.long
def test_many_random_texts_of_the_suites_schemas_are_valid() -> None:
    assert judge_texts(100) >= 25_000


def judge_texts(num_texts: int) -> int:
    """Let every schema's grammar say texts at random; return how many ended, all of which are valid."""
    num_finished = 0
    for place, case in enumerate(cases()):
        if case.grammar is None or not python_reads_patterns(case.schema):
            continue
        judge = JUDGES[case.draft](case.schema, format_checker=JUDGES[case.draft].FORMAT_CHECKER)
        for number in range(num_texts):
            text = random_text(case.grammar, random.Random(f"{place} {number}"), 200)
            if text is None:
                continue
            num_finished += 1
            try:
                judge.validate(json.loads(text))
            except ValidationError as error:
                raise AssertionError((case.name, case.schema, text)) from error
    return num_finished


def python_reads_patterns(schema: Any) -> bool:
    r"""Tell whether the judge can read a schema's patterns: Python knows neither ``\p{L}`` nor ``\cC``."""
    for _, each in schemas_in(schema) if isinstance(schema, dict) else ():
        for pattern in (each.get("pattern", ""), *each.get("patternProperties", ())):
            try:
                re.compile(pattern)
            except re.error:
                return False
    return True
