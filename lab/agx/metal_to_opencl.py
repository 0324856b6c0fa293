"""Rewrites one Metal compute kernel as C++ for OpenCL that clang accepts."""

import re
import sys
from types import SimpleNamespace

from metal_declarations import alias_names, parse
from metal_entries import choose, make_kernel, top_tokens
from metal_methods import fix_methods
from metal_tokens import CLASSY, T, attrs, lex, sig, txt
from metal_vectors import fix_fnptr, fix_vectors, fn_params


def function_constants(text):
    """Returns the names that text declares with [[function_constant(n)]]. The text is not yet preprocessed."""
    return set(re.findall(r"\b(\w+)\s*\[\[\s*function_constant\s*\(", text))


def rewrite(text, entry=None, threads=(128, 1, 1), tg=None, fc=None, notes=None):
    """Returns the rewritten kernel and its host name."""
    opts = SimpleNamespace(threads=threads, tg=tg or {}, notes=notes if notes is not None else [])
    fc = fc or {}
    sys.setrecursionlimit(10000)
    toks = lex(text)
    decls = parse(toks, 0, len(toks))
    host, name, args, kd = choose(decls, entry)

    leaves = top_tokens(decls)
    byname, userstructs = {}, set()
    for d in leaves:
        for n in d.names:
            byname.setdefault(n, []).append(d)
        s = {t.s for t in sig(d.toks)[:12]}
        if s & CLASSY or s & {"using", "typedef"}:
            userstructs |= d.names

    # Drops declarations that the kernel does not need.
    def droppable(d):
        if d is kd:
            return False
        if d.inst or d.kernel:
            return True
        # The shim has its own versions of Apple's internal names.
        return any(u.startswith("__metal_") for u in d.uses)

    seen, work = set(), set(kd.uses)
    for a in args or []:
        work |= {t.s for t in a if t.k == "id"}
    alive = {id(kd)}
    while True:
        while work:
            n = work.pop()
            if n in seen:
                continue
            seen.add(n)
            for d in byname.get(n, ()):
                if id(d) not in alive and not droppable(d):
                    alive.add(id(d))
                    work |= d.uses - seen
        for d in leaves:  # an operator stays if all its types stay
            if d.oper and not d.names and id(d) not in alive and not droppable(d):
                mine = d.uses & userstructs
                if not mine or mine <= seen:
                    alive.add(id(d))
                    work |= d.uses - seen
        if not work:
            break

    out, used, made = [], set(), set()
    takers = {}  # maps a template's name to the positions of its function parameters
    for d in leaves:
        if id(d) in alive and d is not kd:
            for n in d.names:
                for k, _ in fn_params(d.toks):
                    takers.setdefault(n, set()).add(k)

    def emit(ds):
        for d in ds:
            if d.kids is not None:
                out.extend(d.head)
                emit(d.kids)
                out.extend(d.tail)
                continue
            if d is kd:
                out.append(d)  # replaced by the rewritten kernel below
                continue
            if not (d.keep or id(d) in alive):
                out.append(T("ws", "\n" * sum(t.s.count("\n") for t in d.toks)))
                continue
            rest, at = attrs(d.toks)
            f = next((x for x in at if x.startswith("function_constant(")), None)
            if f:
                s = sig(rest)
                vn = s[-2].s
                ty = " ".join(t.s for t in s[:-2] if t.s not in ("constant", "const", "static"))
                v = fc.get(vn)
                if v is None:
                    v = "0"
                    opts.notes.append(f"function constant {vn}: no value given, 0 assumed (-D {vn}=VALUE)")
                used.add(vn)
                out.extend(
                    lex(f"constexpr __constant {ty} {vn} = ({ty})({v}); constexpr __constant bool msl_fc_{vn} = true;")
                )
                continue
            s = sig(rest)
            if (
                s
                and "constexpr" in [t.s for t in s[:4]]
                and "constant" not in [t.s for t in s[:6]]
                and not any(t.s == "(" for t in s[: next((i for i, t in enumerate(s) if t.s in "={"), len(s))])
                and not (d.uses & CLASSY)
            ):
                rest = lex("constant ") + rest
            if takers and (d.uses | d.names) & takers.keys():
                pre, rest = fix_fnptr(rest, takers, made)
                out.extend(pre)
            out.extend(rest)

    emit(decls)
    for v in fc:
        if v not in used:
            opts.notes.append(f"function constant {v}: not used by this entry")
    names = alias_names([t for t in out if isinstance(t, T)] + kd.toks)
    new = make_kernel(kd, name, args, opts)
    flat = []
    for t in out:
        if isinstance(t, T):
            flat.append(t)
        else:
            pre, k = fix_fnptr(attrs(new)[0], takers, made)
            flat.extend(pre + k)
    flat = fix_vectors(fix_methods(flat), names)
    res = txt(flat)
    res = re.sub(r"is_function_constant_defined\s*\(\s*(\w+)\s*\)", r"msl_fc_\1", res)
    return '#include "msl_shim.h"\n' + res, host


def parse_threads(s):
    v = [int(x) for x in re.split(r"[x,]", s)] + [1, 1]
    return tuple(v[:3])
