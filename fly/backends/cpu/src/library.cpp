// What belongs to no model: which variants there are, memory, draws from logits, and random numbers. Knows nothing of
// models, calls or caches.
#include <sys/mman.h>

#include "library.h"

using namespace fly;

const Variant* const fly::variants[] = {&avx512bf16, &avx512, &avx2};

// A forward reads every weight, and small pages cost time.
void* fly::allocate(long bytes, bool zero) {
    constexpr long large = 2 << 20;
    void* memory = nullptr;
    if (bytes <= 0) bytes = 64;
    if (posix_memalign(&memory, bytes >= large ? large : 64, bytes)) return nullptr;
#ifdef MADV_HUGEPAGE
    if (bytes >= large) madvise(memory, bytes / large * large, MADV_HUGEPAGE);  // the rest would take a whole one
#endif
    return zero ? memset(memory, 0, bytes) : memory;
}

namespace {

bool runs_here(const Variant* variant) {
    __builtin_cpu_init();
    if (variant == &avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           (variant == &avx512 || __builtin_cpu_supports("avx512bf16"));
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

EXPORT int fly_abi() { return 30; }

// The name of variant ``number``, null after the last; ``runs`` says whether this processor runs it.
EXPORT const char* fly_variant(int number, int32_t* runs) {
    if (number >= (int)(sizeof(variants) / sizeof(*variants))) return nullptr;
    *runs = runs_here(variants[number]);
    return variants[number]->name;
}

// The ``n`` largest of ``logits`` [V], largest first, then ln of the sum of exp over all; n is 1 to V.
EXPORT void fly_top(int variant, const float* logits, int vocab, int n, float* found) {
    variants[variant]->top(logits, vocab, n, found);
}

// What sampling keeps of ``logits`` [B, J, V], float32 (fly/sampling.py: ProcessedDistribution): at each position the
// largest logit, the least that is kept, and ln of the mass kept, [B, J] each; of a row at temperature 0 as at 1.
EXPORT int fly_kept(int variant, const float* logits, int rows, int each, int vocab, const Sampling* how, float* peak,
                    float* least, float* total) {
    const Spread spread(vocab);
    if (!spread.at) return NO_MEMORY;
    variants[variant]->kept(logits, rows, each, vocab, how, spread.at, peak, least, total);
    return OK;
}

// Which of ``count`` drafted tokens the exact rule keeps (sampling.h: accepts), by logits [count, V]; -1 without memory.
EXPORT int fly_accepts(int variant, const float* logits, int vocab, const Sampling* how, const int64_t* drafted,
                       int count, const float* distributions, const float* coins, int all, uint8_t* keeps) {
    const Spread spread(vocab);
    if (!spread.at) return -1;
    return variants[variant]->accepts(logits, vocab, how, drafted, count, distributions, coins, all, spread.at, keeps);
}

// The token after those that stand (sampling.h: follow), by logits [V]; -1 without memory.
EXPORT int64_t fly_follow(int variant, const float* logits, int vocab, const Sampling* how, int64_t rejected,
                          const float* distribution, float uniform) {
    const Spread spread(vocab);
    return spread.at ? variants[variant]->follow(logits, vocab, how, rejected, distribution, uniform, spread.at) : -1;
}

// Uniforms in [0, 1), [B, n], float32 (fly/sampling.py: uniforms).
EXPORT void fly_uniforms(const int64_t* seed, const int64_t* round, int rows, int stream, int n, float* uniform) {
    for (int b = 0; b < rows; b++) uniforms(seed[b], round[b], stream, n, uniform + (long)b * n);
}
