"""Whether a compiled function can raise an error, print or allocate memory.

Kernels call a user's function for each element: nobody checks for errors that it returns, and whatever needs Python
would wait for ever. LLVM's optimised code of the function decides: branches that are never taken are gone. Numba's
types of its variables then tell which statement to name in the message.
"""

import re

from numba.core import ir, types

from ...base.interrupts import uninterrupted

DEFINED = re.compile(r"^define [^\n]*?@(\"[^\"]*\"|[\w.$]+)\((.*?)^}", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r"^  (%\S+) = (.*)", re.MULTILINE)
RETURNED = re.compile(r"^  ret i32 (\S+)", re.MULTILINE)
CALL = re.compile(r"\b(?:call|invoke) [^@%\n]*([@%](?:\"[^\"]*\"|[\w.$]+))\(")
PYTHON = re.compile(r"_?Py|numba_(gil|unpickle)|NRT_\w*(alloc|new)|printf|puts")  # how names begin that need it
UNRESOLVED = re.compile(r"@\"?\.numba\.unresolved\$([^\"\s,]*)")  # the address of a function that calls itself


@uninterrupted
def may_fail(overload):
    """Whether a function that Numba has compiled may return an error, or calls Python."""
    functions = {name.strip('"'): body for name, body in DEFINED.findall(overload.library.get_llvm_str())}
    return _may_fail(overload.fndesc.llvm_func_name, functions, set())


@uninterrupted
def arguments_used(overload):
    """The names of the arguments that a function's code uses, wholly or in part."""
    functions = {name.strip('"'): body for name, body in DEFINED.findall(overload.library.get_llvm_str())}
    _, _, body = functions[overload.fndesc.llvm_func_name].partition("{")
    return set(re.findall(r"%arg\.(\w+)", body))


def _may_fail(name, functions, seen):
    if name in seen:    # it calls itself: an error comes from elsewhere in it
        return False
    if name not in functions:
        return PYTHON.match(name) is not None
    seen.add(name)
    body = functions[name]
    values = dict(ASSIGNED.findall(body))
    called = [_name_of(callee, values) for callee in CALL.findall(body)]
    return any(callee is None or _may_fail(callee, functions, seen) for callee in called) or any(
        not _is_success(x, values, set()) for x in RETURNED.findall(body)
    )


def _name_of(callee, values):
    """The name of a called function; None if only its address is known."""
    if callee[0] == "@":
        return callee[1:].strip('"')
    found = UNRESOLVED.search(values.get(callee, ""))
    return found and found[1]


def _is_success(x, values, seen):
    """Whether a status is 0, or comes from a function that is checked, too."""
    if x[0] != "%" or x in seen:
        return x in seen or x == "0"
    seen.add(x)
    kind, value = values.get(x, "").partition(" ")[::2]
    if kind == "phi":
        return all(_is_success(each, values, seen) for each in re.findall(r"\[ (\S+),", value))
    if kind == "select":
        return all(_is_success(each, values, seen) for each in re.findall(r"i32 (\S+?)(?:,|$)", value))
    return CALL.search(values.get(x, "")) is not None


# ---------------------------------------------------------------------------------------------------------------- where
IN_ARRAYS = "give its numbers in arrays="
ALLOCATED = {
    types.List: f"makes a list, whose memory may be missing: write a tuple, or {IN_ARRAYS}",
    types.ListType: f"makes a list, whose memory may be missing: write a tuple, or {IN_ARRAYS}",
    types.Set: "makes a set, whose memory may be missing: write i in (1, 2)",
    types.DictType: f"makes a dictionary, in which a key may be missing: {IN_ARRAYS}",
    types.UnicodeType: "makes a string, whose memory may be missing: leave it out",
    types.Array: f"makes an array, whose memory may be missing: {IN_ARRAYS}",
}


def reason(overload):
    """(line, file, what is done there, what to write instead) for the statement that may be why a function may fail;
    None if none is known."""
    for statement, annotation in _statements(overload, set()):
        text = _reason(statement, annotation.typemap)
        if text:
            return statement.loc.line, statement.loc.filename, text
    return None


def _statements(overload, seen):
    """(statement, types) of a function and those of the user's own that it calls."""
    annotation = overload.type_annotation
    if id(annotation) in seen:
        return
    seen.add(id(annotation))
    for _, block in sorted(annotation.blocks.items()):
        yield from ((statement, annotation) for statement in block.body)
    for kind in annotation.typemap.values():
        for called in kind.dispatcher.overloads.values() if isinstance(kind, types.Dispatcher) else ():
            yield from _statements(called, seen)


def _reason(statement, typemap):
    if isinstance(statement, ir.Print):
        return "prints, for which compiled code would wait for Python: leave it out"
    if not isinstance(statement, ir.Assign) or not isinstance(statement.value, ir.Expr):
        return None
    value = statement.value
    if value.op == "getitem" and isinstance(typemap[value.value.name], types.BaseTuple):
        return f"looks up an entry of a tuple, which may not be there: {IN_ARRAYS}"
    if value.op == "call" and len(value.args) == 3 and isinstance(typemap[statement.target.name], types.RangeType):
        return "counts in steps that may be 0: write a number for the step"
    made = typemap[statement.target.name] if value.op.startswith(("build", "call", "binop")) else None
    return next((text for kind, text in ALLOCATED.items() if isinstance(made, kind)), None)
