// From logits to distributions, draws from these, and the exact rule for drafted tokens. Knows nothing of models or
// calls.

// The id of the largest logit, the lowest among equals. ``numbers`` (or null) is set to whether none of them is NaN.
inline int64_t best(const float* logits, int vocab, bool* numbers = nullptr) {
    Vec most = set1(-__builtin_inff());
    float peak = -__builtin_inff();
    bool all = true;
    int v = 0;
    for (; v + W <= vocab; v += W) {
        const Vec some = ld(logits + v);
        most = larger(most, some);  // which may lose a NaN
        if (numbers) all &= equal(some, some) == (1u << W) - 1;
    }
    for (int rest = v; rest < vocab; rest++) peak = max_of(logits[rest], peak), all &= logits[rest] == logits[rest];
    if (numbers) *numbers = all;
    peak = max_of(largest(most), peak);
    const Vec wanted = set1(peak);
    for (v = 0; v + W <= vocab; v += W)
        if (const unsigned same = equal(ld(logits + v), wanted)) return v + __builtin_ctz(same);
    for (; v < vocab; v++)
        if (logits[v] == peak) return v;
    return 0;
}

// An integer for each float, in the same order.
inline int32_t rank_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float of_rank(int32_t rank) {
    const int32_t bits = rank ^ ((rank >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The least x such that the ``mass`` of all logits above x (null: their count) is less than ``limit``.
inline float least_kept(const float* logits, const float* mass, int room, float peak, float limit) {
    int64_t low = rank_of(-__builtin_inff()), high = rank_of(peak);
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const Vec cut = set1(of_rank((int32_t)middle));
        Vec above = zero();
        for (int v = 0; v < room; v += W) above += where_above(ld(logits + v), cut, mass ? ld(mass + v) : set1(1.0f));
        if (sum(above) < limit)
            high = middle;
        else
            low = middle + 1;
    }
    return of_rank((int32_t)high);
}

// The logits that sampling keeps (fly/runner/sampling.py: ProcessedDistribution): the largest (the peak), the least,
// and their mass, the sum of exp((logit - peak) / temperature).
struct Kept {
    float peak, least, total;
};

// Applies top-k, top-p and min-p as ``how`` says. Leaves the logits in ``spread`` [2, room], and the mass of each kept
// one, with zeros for the others. (top-k counts in floats, which are exact up to 2^24.)
inline Kept keep(const Sampling& how, const float* raw, int vocab, float* spread) {
    const int room = padded(vocab);
    float *logits = spread, *mass = spread + room;
    memcpy(logits, raw, vocab * sizeof(float));
    for (int v = vocab; v < room; v++) logits[v] = -__builtin_inff();
    Vec most = set1(-__builtin_inff());
    for (int v = 0; v < room; v += W) most = larger(most, ld(logits + v));
    const float peak = largest(most);
    float least = -__builtin_inff();
    if (how.top_k) least = least_kept(logits, nullptr, room, peak, (float)min_of(how.top_k, vocab));
    const auto keep_from = [&](float from, auto mass_of) {  // returns the mass of all logits from ``from`` up
        const Vec cut = set1(from);
        Vec all = zero();
        for (int v = 0; v < room; v += W) {
            const Vec logit = ld(logits + v), kept = where_from(logit, cut, mass_of(v, logit));
            st(mass + v, kept);
            all += kept;
        }
        return sum(all);
    };
    const Vec top = set1(-peak), temperature = set1(how.temperature);
    float total = keep_from(least, [&](int, Vec logit) { return exponential((logit + top) / temperature); });
    float kept_from = least;
    if (how.top_p < 1) kept_from = max_of(least_kept(logits, mass, room, peak, how.top_p * total), kept_from);
    kept_from = max_of(peak + how.floor, kept_from);
    if (kept_from > least) total = keep_from(kept_from, [&](int v, Vec) { return ld(mass + v); });
    return {peak, kept_from, total};
}

// The same for ``rows`` of ``each`` positions, each row by its own ``how``. ``total`` is ln of the mass.
void kept(const float* logits, int rows, int each, int vocab, const Sampling* how, float* spread, float* peak,
          float* least, float* total) {
    for (int at = 0; at < rows * each; at++) {
        Sampling mine = how[at / each];
        if (!mine.temperature) mine.temperature = 1;  // not used, but avoids a division by 0
        const Kept limits = keep(mine, logits + (long)at * vocab, vocab, spread);
        peak[at] = limits.peak, least[at] = limits.least, total[at] = __builtin_logf(limits.total);
    }
}

// Draws a token from a distribution [V] that need not sum to 1 (fly/ops/random.py: draw). -1 if it has no mass.
inline int64_t pick(const float* distribution, int vocab, float uniform) {
    double whole = 0, so_far = 0;
    for (int v = 0; v < vocab; v++) whole += distribution[v];
    const double wanted = (double)uniform * whole;
    for (int v = 0; v < vocab && whole > 0; v++) {
        so_far += distribution[v];
        if (so_far > wanted) return v;
    }
    return -1;
}

// The processed distribution of logits, in the second half of ``spread`` [2, V padded]. ``peak`` is its largest probability.
inline float* distribution_of(const Sampling& how, const float* raw, int vocab, float* spread, float* peak = nullptr) {
    const int room = padded(vocab);
    const Kept kept = keep(how, raw, vocab, spread);
    if (peak) *peak = 1 / kept.total;
    const Vec total = set1(kept.total);
    float* mass = spread + room;
    for (int v = 0; v < room; v += W) st(mass + v, ld(mass + v) / total);
    return mass;
}

// Decides by coins whether the exact rule keeps each drafted token (fly/policies/base.py: exact_accept_probs), for the
// tokens up to the first mismatch or for ``all``. Tokens were drawn from ``distributions`` [count, V]; null: a
// deterministic draft. Returns the number of the first mismatch, ``count`` if there is none, or NO_NUMBER if a chance
// is NaN. ``keeps`` [count] is out, or null.
int accepts(const float* logits, int vocab, const Sampling* how, const int64_t* drafted, int count, const float* distributions,
            const float* coins, bool all, float* spread, uint8_t* keeps) {
    int first = count;
    for (int j = 0; j < count && (all || first == count); j++, logits += vocab) {
        const int64_t token = drafted[j];
        bool kept;
        if (how->temperature > 0) {
            constexpr float least = 1.17549435e-38f;
            const float target = distribution_of(*how, logits, vocab, spread)[token];
            const float draft = distributions ? distributions[(long)j * vocab + token] : 1;
            if (draft != draft) return NO_NUMBER;
            kept = coins[j] < target / max_of(draft, least);
        } else {
            kept = best(logits, vocab) == token;
        }
        if (keeps) keeps[j] = kept;
        if (!kept && first == count) first = j;
    }
    return first;
}

// Draws the token after the kept ones: from the target's distribution or, if a drafted token was ``rejected`` there
// (else -1), from the residual max(0, target - draft). The draft's ``distribution`` [V] is null if the draft proposed
// that token with certainty. Returns NO_NUMBER if the residual holds a NaN.
int64_t follow(const float* logits, int vocab, const Sampling* how, int64_t rejected, const float* distribution, float uniform,
               float* spread) {
    if (!(how->temperature > 0)) return best(logits, vocab);
    float *target = distribution_of(*how, logits, vocab, spread), *left = spread;
    if (rejected >= 0) {
        bool numbers = true;
        for (int v = 0; v < vocab; v++) {
            const float rest = target[v] - (distribution ? distribution[v] : v == rejected);
            left[v] = rest > 0 ? rest : 0;
            numbers &= rest == rest;
        }
        if (!numbers) return NO_NUMBER;
        // The residual has no mass. Then the distributions are equal but for rounding, so draw from the target's.
        if (const int64_t token = pick(left, vocab, uniform); token >= 0) return token;
    }
    const int64_t token = pick(target, vocab, uniform);
    return token < 0 ? 0 : token;
}

// Finds the ``n`` largest logits, largest first (-inf if there are fewer), and then ln of the sum of exp over all logits.
void top(const float* logits, int vocab, int n, float* largest) {
    for (int i = 0; i < n; i++) largest[i] = -__builtin_inff();
    auto insert = [&](float x) {
        int at = n - 1;
        for (; at > 0 && largest[at - 1] < x; at--) largest[at] = largest[at - 1];
        largest[at] = x;
    };
    alignas(64) float rest[W];
    const int whole = vocab / W * W;
    for (int i = 0; i < W; i++) rest[i] = whole + i < vocab ? logits[whole + i] : -__builtin_inff();
    Vec least = set1(largest[n - 1]);
    for (int v = 0; v <= whole; v += W) {
        const float* from = v < whole ? logits + v : rest;
        const Vec values = ld(from);
        if (equal(larger(values, least), least) == (1u << W) - 1) continue;
        for (int i = 0; i < W; i++)
            if (from[i] > largest[n - 1]) insert(from[i]);
        least = set1(largest[n - 1]);
    }
    const Vec peak = set1(-largest[0]);
    Vec all = zero();
    for (int v = 0; v <= whole; v += W) all += exponential(ld(v < whole ? logits + v : rest) + peak);
    largest[n] = largest[0] + __builtin_logf(sum(all));
}

// The entropy in nats of the softmax of logits / temperature over the logits from ``least`` up. ``peak`` is the largest. With
// m = exp((logit - peak) / temperature) of mass S, it is ln S - sum(m · ln m) / S.
float entropy(const float* logits, int vocab, float temperature, float peak, float least) {
    alignas(64) float rest[W];
    const int whole = vocab / W * W;
    for (int i = 0; i < W; i++) rest[i] = whole + i < vocab ? logits[whole + i] : -__builtin_inff();
    const Vec lowest = set1(max_of(least, -__FLT_MAX__));  // a banned token (-inf) has no mass
    const Vec top = set1(-peak), divisor = set1(temperature);
    Vec mass = zero(), weighted = zero();
    for (int v = 0; v <= whole; v += W) {
        const Vec logit = ld(v < whole ? logits + v : rest), log = (logit + top) / divisor, m = exponential(log);
        mass += where_from(logit, lowest, m), weighted += where_from(logit, lowest, m * log);
    }
    const float total = sum(mass);
    return max_of(__builtin_logf(total) - sum(weighted) / total, 0.0f);
}
