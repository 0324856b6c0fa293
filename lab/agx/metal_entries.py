"""Finds the kernels of a file, and rewrites the head of one kernel for C++ for OpenCL."""

import re

from metal_declarations import SCAL, VECN, next_sig, prev_sig, walk
from metal_methods import LAUNCH, POS
from metal_tokens import Err, T, attrs, lex, match, match_angle, sig, split_commas, txt


def kernel_head(toks):
    """Returns the token indexes of the kernel's name, of '(' and of ')' in the declaration."""
    i = 0
    while i < len(toks):
        t = toks[i]
        if t.k == "id" and t.s == "template":
            a = next_sig(toks, i)
            if toks[a].s == "<":
                i = match_angle(toks, a, None, True) + 1
                continue
        if t.s == "[" and i + 1 < len(toks) and toks[i + 1].s == "[":
            i = match(toks, i) + 1
            continue
        if t.k == "id" and t.s in ("__attribute__", "decltype"):
            i = match(toks, next_sig(toks, i)) + 1
            continue
        if t.s == "(" and t.k == "op":
            return prev_sig(toks, i), i, match(toks, i)
        i += 1
    raise Err("cannot read a kernel declaration")


def template_params(toks):
    s = sig(toks)
    if not s or s[0].s != "template" or s[1].s != "<":
        return None
    res = []
    for p in split_commas(s[2 : match_angle(s, 1, None, True)]):
        dflt = None
        eq = next((i for i, t in enumerate(p) if t.s == "="), None)
        if eq is not None:
            dflt, p = p[eq + 1 :], p[:eq]
        star = next((i for i, t in enumerate(p) if t.s == "(" and i + 1 < len(p) and p[i + 1].s in ("*", "&")), None)
        ids = [t.s for t in p if t.k == "id"]
        name = p[star + 2].s if star is not None else (ids[-1] if ids else None)
        res.append((name, p[0].s in ("typename", "class"), dflt))
    return res


def top_tokens(decls):
    """Returns all declarations except namespaces, including the declarations inside namespaces."""
    return [d for d in walk(decls) if d.kids is None]


def find_entries(decls):
    """Returns two results: the kernels by name, and the instantiations as (host name, kernel name, argument tokens)."""
    kernels, insts = {}, []
    for d in top_tokens(decls):
        if d.kernel and not d.inst:
            n, a, b = kernel_head(d.toks)
            name = d.toks[n].s
            _, at = attrs(d.toks[:a])
            host = next((x[len('host_name("') : -2] for x in at if x.startswith('host_name("')), None)
            e = next_sig(d.toks, b)
            if e is not None and d.toks[e].s == ";":
                continue  # a declaration without a body
            kernels.setdefault(name, []).append(d)
            if host:
                insts.append((host, name, None))
        elif d.inst:
            s = sig(d.toks)
            rest, at = attrs(s[1:])
            host = next((x for x in at if x.startswith("host_name(")), None)
            if host is None and not any(t.s == "kernel" for t in rest) and "kernel" not in at:
                continue
            if rest and rest[-1].s == ";":
                rest = rest[:-1]
            if rest and rest[-1].s == ")":  # explicit parameter list
                k, dep = len(rest) - 1, 0
                while True:
                    if rest[k].s == ")":
                        dep += 1
                    elif rest[k].s == "(":
                        dep -= 1
                        if dep == 0:
                            break
                    k -= 1
                rest = rest[:k]
            args = None
            if rest and rest[-1].s == ">":
                k, dep = len(rest) - 1, 0
                while True:
                    if rest[k].s == ">":
                        dep += 1
                    elif rest[k].s == "<":
                        dep -= 1
                        if dep == 0:
                            break
                    k -= 1
                args = split_commas(rest[k + 1 : -1])
                rest = rest[:k]
            name = rest[-1].s if rest else None
            hn = re.sub(r"^host_name\(|\)$", "", host) if host else name
            hn = hn.replace('"', "")
            if name:
                insts.append((hn, name, args))
    return kernels, insts


def choose(decls, entry):
    kernels, insts = find_entries(decls)
    listing = sorted({h for h, _, _ in insts} | {k for k, v in kernels.items() if template_params(v[0].toks) is None})
    if not kernels:
        raise Err("no kernel function found")
    pick = None
    if entry is None:
        if len(listing) == 1:
            entry = listing[0]
        else:
            raise Err(
                "several kernels; choose one with --entry:\n  "
                + "\n  ".join(listing[:60])
                + (f"\n  ... {len(listing)} in all" if len(listing) > 60 else "")
            )
    m = re.match(r"^\s*(\w+)\s*<(.*)>\s*$", entry, re.S)
    hits = [x for x in insts if x[0] == entry]
    if hits:
        pick = hits[0]
    elif m:
        pick = (m.group(1), m.group(1), split_commas(lex(m.group(2))))
    elif entry in kernels:
        if template_params(kernels[entry][0].toks) is not None:
            raise Err(f'{entry} is a template: give a host name, or --entry "{entry}<...>"')
        pick = (entry, entry, None)
    else:
        near = [x for x in listing if entry.split("<")[0][:12] in x][:40] or listing[:40]
        raise Err(f"no kernel with host name {entry}; there are:\n  " + "\n  ".join(near))
    host, name, args = pick
    if name not in kernels:
        raise Err(f"{host}: kernel function {name} has no definition here")
    best = None
    for d in kernels[name]:
        tp = template_params(d.toks)
        if (tp is None) == (args is None) and (tp is None or len(tp) >= len(args)):
            best = d
            break
    if best is None:
        raise Err(f"{host}: template arguments do not fit {name}")
    return host, name, args, best


def substitute(toks, sub):
    out = []
    for i, t in enumerate(toks):
        if t.k == "id" and t.s in sub:
            p = prev_sig(toks, i)
            if p is None or toks[p].s not in (".", "->", "::"):
                out += sub[t.s]
                continue
        out.append(t)
    return out


def hoist_threadgroup(body):
    """Moves threadgroup arrays from inner scopes of a kernel to its outermost scope."""
    out, moved, i, depth = [], [], 0, 0
    while i < len(body):
        t = body[i]
        if t.s == "{" and t.k == "op":
            depth += 1
        elif t.s == "}" and t.k == "op":
            depth -= 1
        elif t.k == "id" and t.s == "threadgroup" and depth > 1:
            p = prev_sig(body, i)
            e = next(j for j in range(i, len(body)) if body[j].s == ";")
            st = sig(body[i:e])
            if body[p].s in (";", "{", "}") and not any(x.s in ("*", "&", "(", "=") for x in st):
                moved += [*body[i : e + 1], T("ws", " ")]
                i = e + 1
                continue
        out.append(t)
        i += 1
    return out, moved


def make_kernel(d, name, args, opts):
    toks = d.toks
    tp = template_params(toks)
    sub = {}
    if tp is not None:
        toks = toks[:]
        a = next_sig(toks, next(i for i, t in enumerate(toks) if t.s == "template"))
        toks = toks[match_angle(toks, a, None, True) + 1 :]
        for i, (pn, is_type, dflt) in enumerate(tp):
            v = args[i] if i < len(args) else dflt
            if v is None:
                raise Err(f"template parameter {pn} of {name} has no value")
            v = substitute(sig(v), sub)
            if is_type:
                spaced = []
                for k, t in enumerate(v):
                    if k and t.k == "id" and v[k - 1].k == "id":
                        spaced.append(T("ws", " "))
                    spaced.append(t)
                v = spaced
            if not is_type and len(v) > 1 and any(t.k == "op" and t.s not in ("::",) for t in v):
                v = [T("op", "("), *v, T("op", ")")]
            if pn:
                sub[pn] = v
        toks = substitute(toks, sub)
    _n, a, b = kernel_head(toks)
    params, pro, used_launch = [], [], []
    for k, p in enumerate(split_commas(toks[a + 1 : b])):
        p, at = attrs(p)
        s = sig(p)
        if not s:
            continue
        eq = next((i for i, t in enumerate(s) if t.s == "="), None)
        if eq is not None:
            s = s[:eq]
        arr = next((i for i, t in enumerate(s) if t.s == "[" and t.k == "op"), None)
        if arr is not None:
            s = s[:arr]
            s.insert(len(s) - 1, T("op", "*"))
        if s[-1].k != "id" or len(s) == 1 or s[-1].s in SCAL or s[-1].s in VECN:
            s.append(T("id", f"msl_arg{k}_"))
        pname = s[-1].s
        ty = s[:-1]
        words = {t.s for t in ty}
        builtin = next((x for x in at if x in POS or x in LAUNCH), None)
        ttxt = " ".join(t.s for t in ty)
        if builtin:
            if ty and ty[-1].s == "&":
                ttxt = " ".join(t.s for t in ty[:-1])
            core = " ".join(t.s for t in ty if t.s not in ("const", "thread", "&"))
            if builtin in POS:
                v = POS[builtin]
            else:
                c = LAUNCH[builtin]
                if builtin not in used_launch:
                    used_launch.append(builtin)
                v = ", ".join(f"msl_{builtin}_{i}" if i < c else "1" for i in range(3))
            pro.append(f"{core} {pname} = msl_pos<{core}>({v});")
            continue
        for bad in ("texture", "sampler", "stage_in", "payload", "imageblock_data", "color"):
            if any(x.startswith(bad) for x in at) or any(re.match(r"texture\d|sampler$|imageblock$", w) for w in words):
                raise Err(f"{name}: parameter {pname}: {bad} arguments are not supported")
        unknown = [x for x in at if not re.match(r"(buffer|threadgroup|function_constant|id)\(|^raster_order_group", x)]
        if unknown:
            raise Err(f"{name}: parameter {pname}: attribute {unknown[0]} is not supported")
        ref = ty[-1].s == "&"
        base = " ".join(t.s for t in (ty[:-1] if ty[-1].s in ("&", "*") else ty))
        if "threadgroup" in words:
            idx = next((int(re.sub(r"\D", "", x)) for x in at if x.startswith("threadgroup(")), 0)
            size = opts.tg.get(idx)
            if size is None:
                size = 8192
                opts.notes.append(f"threadgroup({idx}) {pname}: no size given, {size} bytes assumed (--tg {idx}=BYTES)")
            pro.append(f"__local char msl_tg{idx}_[{size}] __attribute__((aligned(16)));")
            if ref:
                pro.append(f"{base} &{pname} = *({base} *)msl_tg{idx}_;")
            else:
                pro.append(f"{base} *{pname} = ({base} *)msl_tg{idx}_;")
        elif ref:
            params.append(f"{base} *msl_p_{pname}")
            pro.append(f"{base} &{pname} = *msl_p_{pname};")
        elif ty[-1].s == "*":
            params.append(f"{base} *{pname}")
        elif "constant" in words or "device" in words:
            raise Err(f'{name}: parameter {pname}: cannot read "{ttxt}"')
        else:
            params.append(f"{ttxt} {pname}")
    for query in used_launch:
        params += [f"uint msl_{query}_{i}" for i in range(LAUNCH[query])]
    body = toks[b + 1 :]
    k = next(i for i, t in enumerate(body) if t.s == "{" and t.k == "op")
    body, moved = hoist_threadgroup(body)
    x, y, z = opts.threads
    head = (
        f'extern "C" __attribute__((reqd_work_group_size({x},{y},{z}))) __kernel void {name}(' + ", ".join(params) + ")"
    )
    lines = txt(d.toks).count("\n") - txt(body[k + 1 :]).count("\n")  # keep the line numbers of what follows
    return lex("\n" * max(lines, 0) + head + "{ " + " ".join(pro) + " " + txt(moved).replace("\n", " ")) + body[k + 1 :]
