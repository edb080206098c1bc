// The decision on one row's drafted block. fly/policies/verification.py makes the same decision in tensors.
//
// Rounds in one call (rounds.cpp) call ``Decider::decide`` for each row. So does ``fly_decide``, at the end of this
// file, for blocks whose logits Python holds (fly/backends/cpu/host.py). In order:
//
// 1. The exact rule decides which drafted tokens it keeps: at temperature 0 those that equal the target's choices,
//    above it by the row's coins.
// 2. A token that it rejects is a mismatch. If the clauses of the row's rule that hold for it are enough, it is excused and
//    kept. (If the rule is a gate, the clauses decide about every token, whatever the exact rule says.)
// 3. The longest prefix of kept tokens stands.
// 4. The target's own token follows: the correction of the first rejected token or, after a whole draft, the bonus.
//
// Nothing interrupts a decision. If it depends on a NaN, or on a rule that only Python knows, the block stays open: no
// token is kept here, and Python decides. Nothing is computed before it is asked for. Knows nothing of models, caches or
// rounds.
#include "decide.h"

#include <math.h>

#include "clauses.h"

using namespace fly;

namespace {

constexpr int LEFT_OPEN = -1;     // returned in place of the number of kept tokens
constexpr int8_t UNKNOWN = -1;

// A clause's values, under the names of its kind.
template <class Kind>
Kind values_of(const Clause& clause) {
    Kind values;
    memcpy(&values, clause.value, sizeof values);
    return values;
}

}  // namespace

// One row's block in one round.
struct Decider::Block {
    const int row, round, count;   // ``count`` drafted tokens
    const int64_t* drafted;
    const int32_t* choice;         // the target's most likely tokens
    const float *logits, *distributions;
    const Rule& rule;
    const Sampling* how;           // null at temperature 0
    const int64_t length;
    const int64_t* text;
    bool met_nan = false;          // a chance of the exact rule was none
    int64_t relaxed = 0;           // how many mismatches are excused so far
    double nats = 0, regret = 0;   // of these
};

// A drafted token that clauses are asked about, and the target's output at its place. All mismatches before it are excused.
struct Decider::Place {
    Decider& decider;
    Block& block;
    const int node;        // the token's number in the draft
    const int64_t token;
    const float* logits;   // [V]
    const float logit;     // the token's
    bool has_looked = false, has_processed = false;
    int likeliest_count;
    float likeliest[3 + 1];  // the largest logits, and after the last ln of the sum of exp over all
    struct {
        float peak, least, total;  // the largest logit, the least that is kept, and ln of the mass that is kept
    } kept;

    Place(Decider& of, Block& in, int number)
        : decider(of), block(in), node(number), token(in.drafted[number]), logits(in.logits + (long)number * of.rules.vocab),
          logit(logits[token]), likeliest_count(min_of(of.rules.vocab, 3)) {}

    const Since& since() const { return decider.since[block.row]; }
    bool is_banned() const { return logit == -__builtin_inff(); }
    bool is_choice() const { return block.choice[node] == token; }
    float regret() const { return decider.regret(block, node); }

    // Finds the largest logits. Returns ln of the sum of exp over all.
    float look() {
        if (!has_looked) decider.code->top(logits, decider.rules.vocab, likeliest_count, likeliest);
        has_looked = true;
        return likeliest[likeliest_count];
    }

    // Finds what sampling keeps.
    void process() {
        if (!has_processed)
            decider.code->kept(logits, 1, 1, decider.rules.vocab, block.how, decider.spread, &kept.peak, &kept.least, &kept.total);
        has_processed = true;
    }

    // -ln of the token's probability in the raw distribution.
    double nats() { return (double)look() - logit; }

    // The probability of a logit in the distribution that gates use: the processed one, or at temperature 0 the raw one
    // (fly/policies/formulas.py: gate_probs).
    float probability(float of) {
        const float peak = logits[block.choice[node]];
        if (!block.how) return expf((of - peak) - (look() - peak));
        process();
        return of < kept.least ? 0 : expf((of - kept.peak) / block.how->temperature - kept.total);
    }
    float largest_probability() { return probability(logits[block.choice[node]]); }

    // The entropy in nats of the three likeliest tokens, not renormalised. The probabilities are the softmax of the logits
    // or, if ``processed``, those of the processed distribution.
    double top3_entropy(bool processed) {
        double entropy = 0, peak = 0, temperature = 1, total = look();
        float least = -__builtin_inff();
        if (processed && block.how) {
            process();
            peak = kept.peak, total = kept.total, least = kept.least, temperature = block.how->temperature;
        }
        for (int i = 0; i < likeliest_count; i++) {
            const float logit = likeliest[i];
            const double log = (logit - peak) / temperature - total;
            if (logit > -__builtin_inff() && logit >= least) entropy -= exp(log) * log;
        }
        return max_of(entropy, 0.0);
    }

    // The entropy in nats of all tokens.
    float entropy(bool processed) {
        if (!processed || !block.how)
            return decider.code->entropy(logits, decider.rules.vocab, 1, logits[block.choice[node]], -__builtin_inff());
        process();
        return decider.code->entropy(logits, decider.rules.vocab, block.how->temperature, kept.peak, kept.least);
    }

    // Whether a clause, before its negation, holds: a function for each kind.
#define KIND(name, ...) bool holds(const clauses::name& it);
    CLAUSES(KIND)
#undef KIND
};

// The clauses. Each function is named by the tensor form that it repeats, to the rounding of float32: a number from Python
// counts as a float where a tensor of floats is compared with it. ``it`` has the clause's values.

// fly/policies/conditions.py: EntropyGate, "top3" and "normalized"
bool Decider::Place::holds(const clauses::entropy& it) { return top3_entropy(it.processed) >= it.theta; }
bool Decider::Place::holds(const clauses::normalized_entropy& it) {
    return entropy(it.processed) / log(max_of(decider.rules.vocab, 2)) >= it.theta;
}

// fly/policies/conditions.py: AgreeingWindow
bool Decider::Place::holds(const clauses::window& it) {
    if (it.window > block.count - 1 - node) return false;
    for (int i = 1; i <= it.window; i++)
        if (!decider.agrees_with(block, node + i)) return false;
    return true;
}

// fly/policies/conditions.py: Room
bool Decider::Place::holds(const clauses::room& it) { return block.count - 1 - node >= it.hold; }

// fly/policies/conditions.py: ControlToken
bool Decider::Place::holds(const clauses::control&) { return decider.rules.control[token]; }

// fly/policies/gates.py: LogMargin
bool Decider::Place::holds(const clauses::margin& it) { return regret() < (float)it.tau; }

// fly/policies/gates.py: Regret
bool Decider::Place::holds(const clauses::regret& it) {
    if (it.window > block.count - 1 - node) return false;
    float sum = 0;
    for (int i = 0; i <= it.window; i++) sum += decider.regret(block, node + i);
    return sum <= (float)it.nats;
}

// fly/policies/gates.py: SuffixRegret
bool Decider::Place::holds(const clauses::suffix_regret& it) {
    return it.nats > 0 && regret() <= (float)it.nats * (float)(block.count - node);
}

// fly/policies/gates.py: TopRatio
bool Decider::Place::holds(const clauses::mars& it) {
    look();
    const float first = likeliest[0], second = likeliest[min_of(likeliest_count, 2) - 1];
    return is_choice() || (logit >= second && logit > (float)it.theta * first);
}

// fly/policies/schedule.py: AfterTokens
bool Decider::Place::holds(const clauses::after& it) { return it.generated + since().generated + node >= it.count; }

// fly/policies/schedule.py: AboveContext
bool Decider::Place::holds(const clauses::above& it) { return it.length + since().generated + node >= it.position; }

// fly/policies/schedule.py: Budget
bool Decider::Place::holds(const clauses::budget& it) {
    const double generated = it.generated + since().generated + node + 1;
    const double relaxed = it.relaxed + since().relaxed + block.relaxed + 1;
    return (float)relaxed <= (float)it.share * (float)generated;
}

// fly/policies/schedule.py: AtMost, of the output and of each block
bool Decider::Place::holds(const clauses::at_most& it) {
    return it.relaxed + since().relaxed + block.relaxed + 1 <= it.count;
}
bool Decider::Place::holds(const clauses::at_most_per_block& it) { return block.relaxed + 1 <= it.count; }

// fly/policies/schedule.py: NatsBudget
bool Decider::Place::holds(const clauses::nats& it) {
    return (float)(it.spent + since().nats) + (float)(block.nats + nats()) <= (float)it.most;
}

// fly/policies/schedule.py: RegretBudget
bool Decider::Place::holds(const clauses::regret_budget& it) {
    return it.most > 0 && (float)(it.spent + since().regret) + (float)(block.regret + regret()) <= (float)it.most;
}

// fly/policies/schedule.py: Phase. The last marker before the token decides; ``inside`` if there is none in this call.
bool Decider::Place::holds(const clauses::phase& it) {
    const auto is_marker = [&](int64_t id) { return id == it.start || id == it.end; };
    if (is_marker(token)) return false;
    for (int i = node - 1; i >= 0; i--)
        if (is_marker(block.drafted[i])) return block.drafted[i] == it.start;
    for (int64_t i = block.length - 1; i >= block.length - since().generated; i--)
        if (is_marker(block.text[i])) return block.text[i] == it.start;
    return it.inside;
}

// fly/policies/texts.py: TokenText
bool Decider::Place::holds(const clauses::token& it) {
    return decider.rules.mask[(int64_t)it.mask * decider.rules.vocab + token];
}

// fly/policies/gates.py: Near
bool Decider::Place::holds(const clauses::near& it) {
    const float mine = probability(logit);
    return mine > 0 && mine >= (float)it.share * largest_probability();
}

// fly/policies/gates.py: RelaxedTopN
bool Decider::Place::holds(const clauses::topn& it) {
    const float mine = probability(logit);
    if (!(mine > 0 && mine >= largest_probability() - (float)it.delta)) return false;
    int likelier = 0;
    for (int v = 0; v < decider.rules.vocab; v++) likelier += logits[v] > logit;
    return likelier < it.n;
}

// fly/policies/gates.py: BiLD
bool Decider::Place::holds(const clauses::bild& it) {
    const float mine = probability(logit);
    return -logf(mine) <= (float)it.r || (is_choice() && mine > 0);
}

// fly/policies/gates.py: Typical
bool Decider::Place::holds(const clauses::typical& it) {
    return probability(logit) > min_of((float)it.delta * expf(-entropy(true)), (float)it.eps);
}

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
        if (const int bad = within("clauses", rule.clauses, 0, MOST_CLAUSES) ?:
                            within("clause_at", rule.clause_at, 0, rules.clause.count() - rule.clauses))
            return bad;
    }
    for (const Clause& clause : rules.clause) {
        if (const int bad = within("the kind of a clause", clause.kind, 0, CLAUSE_KINDS - 1)) return bad;
        if (clause.kind != KIND_token) continue;
        const double mask = values_of<clauses::token>(clause).mask;
        if (const int bad = within("the number of a mask", mask >= 0 && mask < MAX_COUNT ? mask : -1, 0, MAX_COUNT) ?:
                            holds("mask", rules.mask, (int64_t)mask + 1, rules.vocab))
            return bad;
    }
    code = variants[rules.variant];
    blocks.mismatches = 0;
    const int error = lay_out(&arena, "a decision", false, [&](Dealer& from) {
        coins = from.take<float>(k + 1), agrees = from.take<int8_t>(k + 1), since = from.take<Since>(rows);
        spread = from.take<float>(2, padded(rules.vocab));
    });
    for (int b = 0; !error && b < rows; b++) since[b] = {};
    return error;
}

void Decider::decide(int b, int round, int64_t length, const int64_t* text, const float* logits, const float* distributions) {
    const long at = place(b, round);
    const bool draws = rules.sampling.there() && rules.sampling[b].temperature > 0;
    Block block = {b, round, blocks.drafted_count[at], blocks.drafted + at * blocks.k, blocks.choice + at * (blocks.k + 1),
                   logits, distributions, rules.rule[b], draws ? rules.sampling + b : nullptr, length, text};
    const int noted_before = blocks.mismatches;
    const int kept = keep_prefix(block);
    const int64_t following = kept < 0 ? NO_NUMBER : follow(block, kept);
    const bool open = following < 0;
    blocks.accepted[at] = open ? 0 : kept;
    blocks.following[at] = open ? NO_NUMBER : following;
    if (open) {
        blocks.mismatches = noted_before;  // Python decides the block anew
        return;
    }
    Since& row = since[b];
    row.generated += kept + 1, row.relaxed += block.relaxed, row.nats += block.nats, row.regret += block.regret;
}

// Whether the target's logits at a place are numbers. A NaN among them would show in the choice.
bool Decider::is_number(const Block& block, int place) const {
    const int32_t choice = block.choice[place];
    return choice >= 0 && !isnan(block.logits[(long)place * rules.vocab + choice]);
}

// Whether the exact rule keeps a drafted token, if all before it are kept (Leviathan et al. 2023, algorithm 1).
bool Decider::agrees_with(Block& block, int node) {
    if (agrees[node] != UNKNOWN) return agrees[node];
    uint8_t keeps = block.drafted[node] == block.choice[node];
    if (block.how) {
        const long at = (long)node * rules.vocab;
        const float* drawn_from = block.distributions ? block.distributions + at : nullptr;
        block.met_nan |= code->accepts(block.logits + at, rules.vocab, block.how, block.drafted + node, 1, drawn_from, coins + node,
                                       true, spread, &keeps) < 0;
    }
    agrees[node] = keeps;
    return keeps;
}

// How much the target's largest logit exceeds the drafted token's, in nats (fly/policies/formulas.py: raw_regret).
float Decider::regret(const Block& block, int node) const {
    if (!is_number(block, node)) return __builtin_nanf("");
    const float* logits = block.logits + (long)node * rules.vocab;
    return logits[block.choice[node]] - logits[block.drafted[node]];
}

// Returns how many tokens are kept, or LEFT_OPEN.
int Decider::keep_prefix(Block& block) {
    const Rule& rule = block.rule;
    if (rule.unknown) return LEFT_OPEN;
    if (block.how) uniforms(rule.seed, block.length, ACCEPT, block.count, coins);
    for (int i = 0; i < block.count; i++) agrees[i] = UNKNOWN;
    int n = 0;
    for (; n < block.count; n++) {
        // The exact rule keeps the token. (A gate is asked about it all the same, but keeps the choice at temperature 0.)
        if (!(rule.is_gate && block.how) && agrees_with(block, n)) continue;
        // The clauses that hold excuse a mismatch or do not. The first one that is not excused ends the prefix. Nothing
        // excuses a token that is banned (-inf).
        if (rule.in_python || !is_number(block, n)) return LEFT_OPEN;
        if (!rule.clauses) break;
        Place at(*this, block, n);
        const uint32_t held = clauses_held(at);
        const bool is_enough = rule.clauses > MOST_TABLED ? held == (1u << rule.clauses) - 1 : rule.table >> held & 1;
        const bool stands = is_enough && !at.is_banned();
        // Where a gate decides in place of the exact rule, only what it keeps beside that rule is told.
        if (rule.is_gate && !stands) break;
        if (rule.is_gate && agrees_with(block, n)) continue;
        note(at, held, stands);
        if (!stands) break;
        block.relaxed++, block.nats += at.nats(), block.regret += at.regret();
    }
    return block.met_nan ? LEFT_OPEN : n;
}

// The target's own token after ``kept`` ones: the correction, or the bonus after a whole draft. NO_NUMBER if it depends on a
// NaN.
int64_t Decider::follow(const Block& block, int kept) {
    if (!is_number(block, kept)) return NO_NUMBER;
    if (!block.how) return block.choice[kept];
    float uniform;
    uniforms(block.rule.seed, block.length, SAMPLE, 1, &uniform);
    const long at = (long)kept * rules.vocab;
    // A gate's correction comes from the target's distribution, like a bonus.
    const bool is_residual = kept < block.count && !block.rule.is_gate;
    return code->follow(block.logits + at, rules.vocab, block.how, is_residual ? block.drafted[kept] : -1,
                        is_residual && block.distributions ? block.distributions + at : nullptr, uniform, spread);
}

// One bit for each clause of the row, set if the clause holds.
uint32_t Decider::clauses_held(Place& at) {
    uint32_t held = 0;
    for (int c = 0; c < at.block.rule.clauses; c++) {
        const Clause& clause = rules.clause[at.block.rule.clause_at + c];
        bool holds = false;
        switch ((ClauseKind)clause.kind) {
#define KIND(name, ...)                                       \
    case KIND_##name: {                                       \
        const auto it = values_of<clauses::name>(clause);     \
        holds = at.holds(it) != (it.negated != 0);            \
        break;                                                \
    }
            CLAUSES(KIND)
#undef KIND
            case CLAUSE_KINDS: break;  // not reached: ``begin`` refuses other kinds
        }
        held |= (uint32_t)holds << c;
    }
    return held;
}

// Notes which clauses held for a mismatch, and whether they excuse it.
void Decider::note(Place& at, uint32_t held, bool excused) {
    const double nats = excused ? at.nats() : 0, regret = excused ? at.regret() : 0;
    blocks.mismatch[blocks.mismatches++] = {at.block.row, at.block.round, at.node, held, excused, nats, regret};
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
        decider.decide(b, 0, length[b], nullptr, logits + b * (k + 1L) * vocab,
                       distributions.there() ? distributions + (long)b * k * vocab : nullptr);
    return OK;
}
