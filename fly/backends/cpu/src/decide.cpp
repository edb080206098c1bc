// The decision on one row's drafted block. fly/policies/verification.py makes the same decision in tensors.
//
// Rounds in one call (rounds.cpp) call ``Decider::decide`` for each row. So does ``fly_decide``, at the end of this
// file, for blocks whose logits Python holds (fly/backends/cpu/host.py). In order:
//
// 1. The exact rule decides which drafted tokens it keeps: at temperature 0 those that equal the target's choices,
//    above it by the row's coins.
// 2. A token that it rejects is a mismatch. If all clauses of the row's rule hold for it, it is excused and kept.
// 3. The longest prefix of kept tokens stands.
// 4. The target's own token follows: the correction of the first rejected token or, after a whole draft, the bonus.
//
// Nothing interrupts a decision. If it depends on a NaN, or on a rule that only Python knows, the block stays open: no
// token is kept here, and Python decides. Knows nothing of models, caches or rounds.
#include "decide.h"

#include <math.h>

using namespace fly;

namespace {

constexpr int LEFT_OPEN = -1;  // returned in place of the number of kept tokens

}  // namespace

// One row's block in one round.
struct Decider::Block {
    int row, round, count;         // ``count`` drafted tokens
    const int64_t* drafted;
    const int32_t* own;            // the target's choices
    const float *logits, *distributions;
    const Rule& rule;
    const Sampling* how;  // null at temperature 0
    int64_t length;
    int64_t following;    // out
};

// The target's output after one token: the largest logits, and ln of the sum of exp over all.
struct Decider::Place {
    const float* logits;
    float likeliest[3 + 1];
    int count;

    double total() const { return likeliest[count]; }
};

int Decider::begin(int rows) {
    const int64_t k = blocks.k, places = (int64_t)rows * blocks.most;
    if (const int bad = check_variant(rules.variant) ?: within("rows", rows, 0, MAX_COUNT) ?: within("k", k, 0, MAX_COUNT) ?:
                        within("most", blocks.most, 1, MAX_COUNT) ?: within("vocab", rules.vocab, 1, MAX_COUNT) ?:
                        within("places", places * (k + 1), 0, MAX_COUNT) ?: holds("rule", rules.rule, rows) ?:
                        holds_or_none("sampling", rules.sampling, rows) ?: holds("drafted", blocks.drafted, places, k) ?:
                        holds("drafted_count", blocks.drafted_count, places) ?:
                        holds("choice", blocks.choice, places, k + 1) ?: holds("accepted", blocks.accepted, places) ?:
                        holds("following", blocks.following, places) ?:
                        (rules.clause.there() ? holds("control", rules.control, rules.vocab) ?:
                                                    holds("mismatch", blocks.mismatch, rows, k + 1) : OK))
        return bad;
    for (int b = 0; b < rows; b++) {
        const Rule& rule = rules.rule[b];
        if (const int bad = within("clauses", rule.clauses, 0, 31) ?:
                            within("clause_at", rule.clause_at, 0, rules.clause.count() - rule.clauses))
            return bad;
    }
    for (const Clause& clause : rules.clause)
        if (const int bad = within("the kind of a clause", clause.kind, 0, CLAUSE_KINDS - 1)) return bad;
    code = variants[rules.variant];
    blocks.mismatches = 0;
    return lay_out(&arena, "a decision", false, [&](Dealer& from) {
        coins = from.take<float>(k + 1), agrees = from.take<uint8_t>(k + 1);
        spread = from.take<float>(2, padded(rules.vocab));
    });
}

void Decider::decide(int b, int round, int64_t length, const float* logits, const float* distributions) {
    const long at = place(b, round);
    const bool draws = rules.sampling.there() && rules.sampling[b].temperature > 0;
    Block block = {b, round, blocks.drafted_count[at], blocks.drafted + at * blocks.k, blocks.choice + at * (blocks.k + 1),
                   logits, distributions, rules.rule[b], draws ? rules.sampling + b : nullptr, length, NO_NUMBER};
    const int noted_before = blocks.mismatches;
    const int kept = keep_prefix(block);
    const bool open = kept < 0 || block.following < 0;
    if (open) blocks.mismatches = noted_before;  // Python decides the block anew
    blocks.accepted[at] = open ? 0 : kept;
    blocks.following[at] = open ? NO_NUMBER : block.following;
}

// Whether the target's logits at a place are numbers. A NaN among them would show in the choice.
bool Decider::is_number(const Block& block, int place) const {
    const int32_t own = block.own[place];
    return own >= 0 && !isnan(block.logits[(long)place * rules.vocab + own]);
}

// Returns how many tokens are kept, or LEFT_OPEN.
int Decider::keep_prefix(Block& block) {
    const int vocab = rules.vocab, count = block.count;
    const int64_t* drafted = block.drafted;
    // The exact rule keeps tokens up to the first mismatch (Leviathan et al. 2023, algorithm 1). Clauses may ask
    // whether later tokens agree, so all tokens are compared.
    int n = 0;
    if (block.how) {
        uniforms(block.rule.seed, block.length, ACCEPT, count, coins);
        const auto exact = [&](int from, bool all) {
            const long at = (long)from * vocab;
            const float* drawn_from = block.distributions ? block.distributions + at : nullptr;
            return code->accepts(block.logits + at, vocab, block.how, drafted + from, count - from, drawn_from, coins + from, all,
                                  spread, agrees + from);
        };
        n = exact(0, false);
        if (n < 0) return LEFT_OPEN;
        if (n < count && block.rule.clauses && exact(n + 1, true) < 0) return LEFT_OPEN;
    } else {
        for (int i = 0; i < count; i++) agrees[i] = drafted[i] == block.own[i];
        while (n < count && agrees[n]) n++;
    }
    // The clauses excuse one mismatch after another, up to the first for which a clause fails.
    while (n < count) {
        if (block.rule.in_python || !is_number(block, n)) return LEFT_OPEN;
        if (!block.rule.clauses) break;
        int agreeing = 0;  // how many tokens right after it agree
        while (n + 1 + agreeing < count && agrees[n + 1 + agreeing]) agreeing++;
        const Place at = look(block, n);
        const uint32_t held = clauses_held(block, at, n, count - 1 - n, agreeing);
        if (!note(block, at, n, held, held == (1u << block.rule.clauses) - 1)) break;
        n += 1 + agreeing;
    }
    // The target's own token follows: the correction, or the bonus after a whole draft.
    if (!is_number(block, n)) return LEFT_OPEN;
    if (!block.how) {
        block.following = block.own[n];
        return n;
    }
    float uniform;
    uniforms(block.rule.seed, block.length, SAMPLE, 1, &uniform);
    const long at = (long)n * vocab;
    block.following = code->follow(block.logits + at, vocab, block.how, n < count ? drafted[n] : -1,
                                    block.distributions ? block.distributions + at : nullptr, uniform, spread);
    return n;
}

Decider::Place Decider::look(const Block& block, int place) const {
    Place found = {block.logits + (long)place * rules.vocab, {}, min_of(rules.vocab, 3)};
    code->top(found.logits, rules.vocab, found.count, found.likeliest);
    return found;
}

// The entropy in nats of the three likeliest tokens, not renormalised (fly/policies/conditions.py: EntropyGate). The
// probabilities are the softmax of the logits or, if ``processed``, those of the processed distribution.
double Decider::entropy(const Block& block, const Place& at, bool processed) {
    double entropy = 0, peak = 0, temperature = 1, total = at.total();
    float least = -__builtin_inff();
    if (processed && block.how) {
        float found[2];
        code->kept(at.logits, 1, 1, rules.vocab, block.how, spread, found, &least, found + 1);
        peak = found[0], total = found[1], temperature = block.how->temperature;
    }
    for (int i = 0; i < at.count; i++) {
        const float logit = at.likeliest[i];
        const double log = (logit - peak) / temperature - total;
        if (logit > -__builtin_inff() && logit >= least) entropy -= exp(log) * log;
    }
    return entropy;
}

// Whether a clause, before its negation, holds for a mismatch at ``node``. ``after`` tokens follow the mismatch, and
// the first ``agreeing`` of them agree.
bool Decider::clause_holds(const Clause& clause, const Block& block, const Place& at, int node, int after, int agreeing) {
    switch ((ClauseKind)clause.kind) {
        case ENTROPY: return entropy(block, at, clause.processed) >= clause.theta;
        case WINDOW: return agreeing >= clause.count;
        case ROOM_LEFT: return after >= clause.count;
        case CONTROL: return rules.control[block.drafted[node]];
        case CLAUSE_KINDS: break;
    }
    return false;  // not reached: ``begin`` refuses other kinds
}

// One bit for each clause of the row, set if the clause holds.
uint32_t Decider::clauses_held(const Block& block, const Place& at, int node, int after, int agreeing) {
    uint32_t held = 0;
    for (int c = 0; c < block.rule.clauses; c++) {
        const Clause& clause = rules.clause[block.rule.clause_at + c];
        held |= (uint32_t)(clause_holds(clause, block, at, node, after, agreeing) != (bool)clause.negated) << c;
    }
    return held;
}

// Notes which clauses held for a mismatch. Returns whether it is kept: nothing excuses a token that is banned (-inf).
bool Decider::note(const Block& block, const Place& at, int node, uint32_t held, bool excused) {
    const double logit = at.logits[block.drafted[node]];
    excused &= logit != -__builtin_inf();
    blocks.mismatch[blocks.mismatches++] = {block.row, block.round, node, held, excused, excused ? at.total() - logit : 0};
    return excused;
}

// Decides one block of each row from ``logits`` [B, k + 1, V] that Python holds. They follow a row's ``length`` [B]
// tokens, and each drafted one. ``distributions`` [B, k, V] are as in ``Decider::decide``, or none.
EXPORT int fly_decide(const Rules* rules, Blocks* blocks, Span<const int64_t> length, Span<const float> logits,
                      Span<const float> distributions) {
    const int rows = (int)length.count(), vocab = rules->vocab, k = blocks->k;
    Decider decider(rules, blocks);
    if (const int error = decider.begin(rows) ?: within("rounds", blocks->most, 1, 1) ?:
                          holds("logits", logits, rows, k + 1L, vocab) ?:
                          holds_or_none("distributions", distributions, rows, k, vocab))
        return error;
    for (int b = 0; b < rows; b++) {
        const int count = blocks->drafted_count[b];
        if (const int error = within("drafted tokens", count, 0, k)) return error;
        for (int n = 0; n <= count; n++)
            if (const int error = within("a choice", blocks->choice[b * (k + 1L) + n], NO_NUMBER, vocab - 1)) return error;
        for (int n = 0; n < count; n++)
            if (const int error = within("a drafted token", blocks->drafted[(long)b * k + n], 0, vocab - 1, OUTSIDE)) return error;
    }
    for (int b = 0; b < rows; b++)
        decider.decide(b, 0, length[b], logits + b * (k + 1L) * vocab,
                       distributions.there() ? distributions + (long)b * k * vocab : nullptr);
    return OK;
}
