// Code that belongs to no model: the variants, memory, errors, sums over logits, and random numbers. Knows nothing of
// models, calls or caches.
#include <sys/mman.h>

#include "clauses.h"
#include "library.h"

using namespace fly;

const Variant* const fly::variants[] = {&amx, &avx512bf16, &avx512, &avx2};

bool fly::intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));

// A forward reads every weight, and small memory pages would slow it down.
void* fly::allocate(int64_t bytes, bool zero) {
    constexpr int64_t large = 2 << 20;
    void* memory = nullptr;
    if (bytes <= 0) bytes = 64;
    if (posix_memalign(&memory, bytes >= large ? large : 64, bytes)) return nullptr;
#ifdef MADV_HUGEPAGE
    if (bytes >= large) madvise(memory, bytes / large * large, MADV_HUGEPAGE);  // the rest would take a whole large page
#endif
    return zero ? memset(memory, 0, bytes) : memory;
}

namespace {

bool runs_here(const Variant* variant) {
    __builtin_cpu_init();
    if (variant == &avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           (variant == &avx512 || __builtin_cpu_supports("avx512bf16"));
}

const char* why_not(const Variant* variant) {
    if (!runs_here(variant)) return LACKS;
    return variant->tiles ? why_no_tiles() : nullptr;
}

constexpr uint64_t MIX = 0x9e3779b97f4a7c15, MIX_LAST = 0x94d049bb133111eb;

uint64_t scramble(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * MIX_LAST;
    return x ^ (x >> 31);
}

}  // namespace

void fly::uniforms(int64_t seed, int64_t round, int stream, int n, float* uniform) {
    const uint64_t key = scramble(scramble((uint64_t)seed + MIX) + (uint64_t)round * MIX + (uint64_t)stream);
    for (int i = 0; i < n; i++) uniform[i] = (float)(scramble(key + (uint64_t)(i + 1) * MIX) >> 40) * 0x1p-24f;
}

int64_t fly::derived(int64_t seed, int64_t position) {
    return (int64_t)scramble(scramble((uint64_t)seed ^ MIX_LAST) + (uint64_t)position * MIX);
}

namespace {

thread_local struct {
    const char* what;
    int64_t has, least, most;
} refusal;

// Scratch memory [2, V padded] for drawing from one row's logits.
int spread_of(Arena* arena, int vocab, Span<float>* spread) {
    return lay_out(arena, "a distribution", false, [&](Dealer& from) { *spread = from.take<float>(2, padded(vocab)); });
}

}  // namespace

int fly::refuse(Error error, const char* what, int64_t has, int64_t least, int64_t most) {
    refusal = {what, has, least, most};
    return error;
}

int fly::check_variant(int variant) { return within("variant", variant, 0, sizeof(variants) / sizeof(*variants) - 1); }

EXPORT int fly_abi() { return 48; }

// Chooses the loops for Intel's processors (1) or for others (0), between calls of models, and returns what was chosen before.
// For tests: both give the same bits on every processor.
EXPORT int fly_loops(int for_intel) {
    const bool before = intel;
    intel = for_intel;
    return before;
}

// What this thread's last error was about. ``has`` [3] gets the value, and the least and most that it may be.
EXPORT const char* fly_refusal(int64_t* has) {
    has[0] = refusal.has, has[1] = refusal.least, has[2] = refusal.most;
    return refusal.what;
}

// Returns the name of variant ``number``, or null after the last one. Sets ``why`` to the reason why the variant does not
// run here, or to null if it does.
EXPORT const char* fly_variant(int number, const char** why) {
    if (check_variant(number)) return nullptr;
    *why = why_not(variants[number]);
    return variants[number]->name;
}

// Returns kind ``number`` of clauses as text: its name and then those of its values, divided by commas (clauses.h). Null after
// the last one.
EXPORT const char* fly_clause(int number) { return number >= 0 && number < CLAUSE_KINDS ? clause_kinds[number] : nullptr; }

// Finds which of ``logits`` [B, J, V] sampling keeps (fly/runner/sampling.py: ProcessedDistribution). ``found`` [3, B,
// J] gets, at each position, the largest logit, the least kept one, and ln of the kept mass. Temperature 0 counts as 1.
EXPORT int fly_kept(int variant, Span<const float> logits, int each, int vocab, Span<const Sampling> how, Span<float> found) {
    const int64_t rows = how.count(), places = rows * each;
    if (const int error = check_variant(variant) ?: within("vocab", vocab, 1, MAX_COUNT) ?:
                          within("positions", places, 0, MAX_COUNT) ?:
                          holds("logits", logits, rows, each, vocab) ?: holds("found", found, 3, places))
        return error;
    Arena arena;
    Span<float> spread;
    if (const int error = spread_of(&arena, vocab, &spread)) return error;
    variants[variant]->kept(logits, (int)rows, each, vocab, how, spread, found, found + places, found + 2 * places);
    return OK;
}

// ``uniform`` [B, n] in [0, 1), a row for each seed (fly/ops/random.py: uniforms).
EXPORT int fly_uniforms(Span<const int64_t> seed, Span<const int64_t> round, int stream, int n, Span<float> uniform) {
    const int64_t rows = seed.count();
    if (const int error = holds("round", round, rows) ?: holds("uniform", uniform, rows, n)) return error;
    for (int64_t b = 0; b < rows; b++) uniforms(seed[b], round[b], stream, n, uniform + b * n);
    return OK;
}
