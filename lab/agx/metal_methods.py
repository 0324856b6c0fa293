"""Rewrites member functions for C++ for OpenCL, so that objects in any address space can call them."""

from metal_declarations import next_sig, prev_sig
from metal_tokens import T, match, match_angle
from metal_vectors import AS


def fix_methods(toks):
    """Adds an address space to member functions that name none, and removes it from constructors.

    In Metal, a member function without an address space accepts objects in thread memory. In C++ for OpenCL it accepts
    objects in the generic address space, and a pointer to the generic space does not convert back to a pointer to
    thread memory. Constructors that the compiler generates are generic, so the other constructors must be generic, too.
    """
    add, drop = {}, set()
    for i, t in enumerate(toks):
        if not (t.k == "id" and t.s in ("struct", "class")):
            continue
        p = prev_sig(toks, i)
        if p is not None and (toks[p].s in ("<", ",", "enum", "friend")):
            continue
        n = next_sig(toks, i)
        if n is None or toks[n].k != "id":
            continue
        cname, b = toks[n].s, next_sig(toks, n)
        if b is not None and toks[b].s == "<":
            b = match_angle(toks, b)
            b = next_sig(toks, b) if b is not None else None
        if b is not None and toks[b].s == ":":
            while toks[b].s not in ("{", ";"):
                b += 1
        if b is None or toks[b].s != "{":
            continue
        e, j = match(toks, b), b + 1
        while j < e:
            if toks[j].k in ("ws", "pp") or toks[j].s == ";":
                j += 1
                continue
            if toks[j].s in ("public", "private", "protected") and toks[next_sig(toks, j)].s == ":":
                j = next_sig(toks, j) + 1
                continue
            m = member_end(toks, j, e)
            member(toks, j, m, cname, add, drop)
            j = m + 1
    # Changes "const thread T & x" to "const T & x". Otherwise the temporary of a conversion cannot bind to x.
    for i, t in enumerate(toks):
        if t.k == "id" and t.s == "thread":
            p, n = prev_sig(toks, i), next_sig(toks, i)
            if (p is not None and toks[p].s == "const") or (n is not None and toks[n].s == "const"):
                k = i
                while k < len(toks) and toks[k].s not in (",", ")", ";", "{", "=", "*", "(", "&", ">"):
                    k += 1
                if k < len(toks) and toks[k].s == "&":
                    drop.add(i)
    out = []
    for i, t in enumerate(toks):
        if i in drop:
            continue
        out.append(t)
        if i in add:
            out += [T("ws", " "), T("id", "thread")]
    return out


def member_end(toks, j, e):
    """Returns the index of a member's last token. A constructor may have initializers, as in `) : a(x), b{y} {`."""
    k, paren = j, False
    while k < e:
        t = toks[k]
        if t.k == "id" and t.s == "template":
            a = next_sig(toks, k)
            if toks[a].s == "<":
                k = match_angle(toks, a, e, True) + 1
                continue
        if t.k == "op":
            if t.s == ";":
                return k
            if t.s in "([":
                paren = paren or t.s == "("
                k = match(toks, k, e)
            elif t.s == "{":
                m = match(toks, k, e)
                p = prev_sig(toks, k)
                n = next_sig(toks, m, e)
                if n is None:
                    return m
                if toks[n].s in (",", "{") and toks[p].k == "id" and paren:  # the braces of an initializer such as b{y}
                    k = m + 1
                    continue
                if paren:
                    return m
                k = m
        k += 1
    return e - 1


def member(toks, j, m, cname, add, drop):
    k, name = j, None
    while k <= m:
        t = toks[k]
        if t.k == "id" and t.s == "template":
            a = next_sig(toks, k)
            if toks[a].s == "<":
                k = match_angle(toks, a, m, True) + 1
                continue
        if t.k == "id" and t.s in (
            "static",
            "friend",
            "using",
            "typedef",
            "struct",
            "class",
            "enum",
            "union",
            "static_assert",
        ):
            return
        if t.k == "id" and t.s in ("__attribute__", "decltype", "alignas"):
            k = match(toks, next_sig(toks, k), m + 1) + 1
            continue
        if t.k == "op" and t.s == "[":  # an attribute, or an array's length, which may call a function
            k = match(toks, k, m + 1) + 1
            continue
        if t.k == "op" and t.s in ("=", "{", ";") and not (t.s == "=" and name == "operator"):
            return
        if t.k == "op" and t.s == "(":
            if name == "operator" and toks[next_sig(toks, k)].s == ")" and toks[prev_sig(toks, k)].s == "operator":
                k = next_sig(toks, k) + 1
                continue
            break
        if t.k == "id":
            name = t.s if name != "operator" else name
        k += 1
    else:
        return
    p = prev_sig(toks, k)
    ctor = toks[p].s == cname or toks[prev_sig(toks, p)].s == "~"
    q = match(toks, k, m + 1)
    last, have = q, False
    n = next_sig(toks, q, m + 1)
    while (
        n is not None
        and toks[n].k == "id"
        and (toks[n].s in AS or toks[n].s in ("const", "noexcept", "override", "final", "volatile"))
    ):
        if toks[n].s in AS:
            have = True
            if ctor and toks[n].s == "thread":
                drop.add(n)
        last = n
        n = next_sig(toks, n, m + 1)
    if not ctor and not have:
        add[last] = True


POS = {
    "thread_position_in_grid": "get_global_id(0), get_global_id(1), get_global_id(2)",
    "thread_position_in_threadgroup": "get_local_id(0), get_local_id(1), get_local_id(2)",
    "threadgroup_position_in_grid": "get_group_id(0), get_group_id(1), get_group_id(2)",
    "thread_index_in_threadgroup": "get_local_linear_id(), 0, 0",
    "thread_index_in_simdgroup": "get_sub_group_local_id(), 0, 0",
    "simdgroup_index_in_threadgroup": "get_sub_group_id(), 0, 0",
    "quadgroup_index_in_threadgroup": "(get_local_linear_id() >> 2), 0, 0",
    "thread_index_in_quadgroup": "(get_sub_group_local_id() & 3), 0, 0",
}


# Values that are unknown until a launch. They become extra arguments, so that the compiler cannot fold them.
LAUNCH = {
    "threads_per_threadgroup": 3,
    "threads_per_grid": 3,
    "threadgroups_per_grid": 3,
    "simdgroups_per_threadgroup": 1,
}
