// The kinds of clauses: single conditions that compiled code evaluates on a drafted token. This is the one list of them.
// The structures below are made from it, and so is what Python knows of them: it asks the library (``fly_clause``), and
// lays each clause's values in this order (fly/backends/cpu/host.py: lay_rules).
//
// A line is KIND(name, values ...), in the names of a condition's ``Clause`` (fly/policies/conditions.py). A new kind is a
// line here, a function ``holds`` in decide.cpp, and a ``_compile`` in the condition's class. Python decides for a library
// that lacks a kind, so ``fly_abi`` stays.
#pragma once
#include "interface.h"

#define CLAUSES(KIND)                          \
    /* fly/policies/conditions.py */           \
    KIND(entropy, theta, processed)            \
    KIND(normalized_entropy, theta, processed) \
    KIND(window, window)                       \
    KIND(room, hold)                           \
    KIND(control)                              \
    /* fly/policies/gates.py: conditions */    \
    KIND(margin, tau)                          \
    KIND(regret, nats, window)                 \
    KIND(suffix_regret, nats)                  \
    KIND(mars, theta)                          \
    /* fly/policies/schedule.py */             \
    KIND(after, count, generated)              \
    KIND(above, position, length)              \
    KIND(budget, share, generated, relaxed)    \
    KIND(at_most, count, relaxed)              \
    KIND(at_most_per_block, count)             \
    KIND(nats, most, spent)                    \
    KIND(regret_budget, most, spent)           \
    KIND(phase, start, end, inside)            \
    /* fly/policies/texts.py */                \
    KIND(token, mask)                          \
    /* fly/policies/gates.py: rules */         \
    KIND(near, share)                          \
    KIND(topn, n, delta)                       \
    KIND(bild, r)                              \
    KIND(typical, eps, delta)

namespace fly {

// The values of a clause of each kind, under their names. Counts, token ids, and what is true or false are doubles too.
// ``mask`` is the number of one in ``Rules::mask``.
namespace clauses {
#define KIND(name, ...) \
    struct name {       \
        double negated, ##__VA_ARGS__; \
    };
CLAUSES(KIND)
#undef KIND
}  // namespace clauses

// The number of each kind, and how many there are.
enum ClauseKind : int32_t {
#define KIND(name, ...) KIND_##name,
    CLAUSES(KIND)
#undef KIND
        CLAUSE_KINDS
};

// Each kind as text: its name, and then those of its values.
constexpr const char* clause_kinds[] = {
#define KIND(name, ...) #name ", " #__VA_ARGS__,
    CLAUSES(KIND)
#undef KIND
};

#define KIND(name, ...) static_assert(sizeof(clauses::name) <= sizeof(Clause::value), "raise MOST_VALUES");
CLAUSES(KIND)
#undef KIND

}  // namespace fly
