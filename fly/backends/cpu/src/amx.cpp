// Products on Intel's tiles (AMX), for the kernels ``amx``; all other code of theirs is that of avx512bf16.cpp. A tile is
// a register of 16 rows by 64 bytes. Knows nothing of models: products.h calls ``multiply_tiles`` for each block of rows.
//
// Panels are read as they are packed (fly.h: Layout). 16 steps of a panel's first or last 16 outputs are a tile of
// weights, and 64 bytes of up to 16 rows of activations a tile of inputs. Each product adds 16 steps to 16 by 16 sums. A
// row's sums do not depend on the other rows of its tile.
//
// This source is compiled without a processor's flags, because ``why_no_tiles`` runs on all. With FLY_EMULATED_TILES it
// is compiled for tests: the instructions come from tests/tiles.h then, and any processor runs them.
#include <string.h>

#include "fly.h"

#ifdef FLY_EMULATED_TILES
#include "tiles.h"
#define ON_TILES
#elif defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ON_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))
#endif

using namespace fly;

#ifdef ON_TILES

namespace {

// The intrinsics take their tiles as literal numbers. They may not say which memory they read, so calls of ``multiply``
// are walled by ``SEEN``.
#define SEEN asm volatile("" ::: "memory")
#define MULTIPLY(SUMS, ROWS, WEIGHTS)              \
    if constexpr (TYPE == W8A8)                    \
        _tile_dpbusd(SUMS, ROWS, WEIGHTS);         \
    else                                           \
        _tile_dpbf16ps(SUMS, ROWS, WEIGHTS)

// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. Two tiles of rows are multiplied with one panel (sums 0 and 1, 2
// and 3), or one tile of rows with one panel (0 and 1) or with two (0 and 1, 2 and 3).
template <int TYPE, int TILES, int PANELS>
ON_TILES NOINLINE void multiply(const TileBlock& of) {
    constexpr long STEPS = 2 * 64, CHUNK = 16 * STEPS;  // bytes from one step to the next, and of 16 steps
    const char *a = of.rows, *w = of.weights;
    SEEN;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long at = 0, ahead = of.ahead; at < of.panel; at += CHUNK, ahead += of.fetched, a += 64) {
        const bool here = ahead < of.panel;  // else beyond the panel's end
        const char* line = here ? of.weights + ahead : of.then + (ahead - of.panel);
        for (int j = 0; j < PANELS; j++, line += here ? of.panel : of.then_panel)
            for (int i = 0; i < of.fetched; i += 64) of.close ? fetch_close(line + i) : fetch(line + i);
        _tile_loadd(4, a, of.row_bytes);
        if constexpr (TILES == 2) _tile_loadd(5, a + of.second, of.row_bytes);
        _tile_loadd(6, w + at, STEPS);
        _tile_loadd(7, w + at + 64, STEPS);
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 4, 7);
        if constexpr (TILES == 2) {
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
        }
        if constexpr (PANELS == 2) {
            _tile_loadd(6, w + of.panel + at, STEPS);
            _tile_loadd(7, w + of.panel + at + 64, STEPS);
            MULTIPLY(2, 4, 6);
            MULTIPLY(3, 4, 7);
        }
    }
    constexpr long ROW = PANELS * PANEL * 4;
    char *sums = (char*)of.sums, *others = sums + (TILES == 2 ? of.second / of.row_bytes * ROW : ROW / 2);
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + 64, ROW);
    if constexpr (TILES * PANELS == 2) {
        _tile_stored(2, others, ROW);
        _tile_stored(3, others + 64, ROW);
    }
    SEEN;
}

// The shapes of all tiles, as LDTILECFG reads them.
struct alignas(64) Config {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];  // of a row of each tile
    uint8_t rows[16];
};

// What these tiles have to give, computed plainly: small whole numbers, whose sums are exact in both types.
template <int TYPE, class Row, class Weight, class Sum>
bool is_right() {
    constexpr int ROWS = 21, CHUNKS = 3, STEP = 4 / sizeof(Row), K = CHUNKS * 16 * STEP;
    alignas(64) Row a[ROWS][K];
    alignas(64) Weight w[2][K / STEP][PANEL][STEP];
    alignas(64) Sum sums[ROWS][2][PANEL];
    const auto number = [](int i) { return (i * 37 + i / 11 * 53) % 251; };
    const auto input = [&](int m, int k) { return TYPE == W8A8 ? number(m * K + k) : number(m * K + k) % 31 - 15; };
    const auto weight = [&](int p, int n, int k) { return number((p * PANEL + n) * K + k) - 125; };
    const auto stored = [](int x) {
        const float wide = (float)x;
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        return TYPE == W8A8 ? x : (int)(bits >> 16);
    };
    for (int m = 0; m < ROWS; m++)
        for (int k = 0; k < K; k++) a[m][k] = (Row)stored(input(m, k));
    for (int p = 0; p < 2; p++)
        for (int n = 0; n < PANEL; n++)
            for (int k = 0; k < K; k++) w[p][k / STEP][n][k % STEP] = (Weight)stored(weight(p, n, k));
    constexpr int SOME[] = {1, 16, ROWS};
    for (const int rows : SOME)
        for (int panels = 1; panels <= (rows > 16 ? 1 : 2); panels++) {
            const long second = rows > 16 ? (rows - 16) * (long)sizeof(a[0]) : 0;
            begin_tiles(rows);
            multiply_tiles({TYPE, panels, (const char*)a, (long)sizeof(a[0]), second, (const char*)w, (long)sizeof(w[0]),
                            0, 0, false, nullptr, 0, sums});
            end_tiles();
            for (int m = 0; m < rows; m++)
                for (int p = 0; p < panels; p++)
                    for (int n = 0; n < PANEL; n++) {
                        long sum = 0;
                        for (int k = 0; k < K; k++) sum += input(m, k) * weight(p, n, k);
                        if ((&sums[0][0][0])[(m * panels + p) * PANEL + n] != (Sum)sum) return false;
                    }
        }
    return true;
}

}  // namespace

ON_TILES void fly::begin_tiles(int rows) {
    Config config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = tile < 6 ? min_of(rows, 16) : 16;
    asm volatile("" ::"r"(&config) : "memory");  // all of it is written; the intrinsic says that it reads 8 bytes
    _tile_loadconfig(&config);
}

ON_TILES void fly::end_tiles() { _tile_release(); }

void fly::multiply_tiles(const TileBlock& of) {
    const bool whole = of.type == W8A8;
    if (of.second) return whole ? multiply<W8A8, 2, 1>(of) : multiply<BFLOAT16, 2, 1>(of);
    if (of.panels == 2) return whole ? multiply<W8A8, 1, 2>(of) : multiply<BFLOAT16, 1, 2>(of);
    whole ? multiply<W8A8, 1, 1>(of) : multiply<BFLOAT16, 1, 1>(of);
}

const char* fly::why_no_tiles() {
#ifndef FLY_EMULATED_TILES
    // Leaf 7 of CPUID: tiles, and their products of both types. The system must save tiles (XCR0), and has to be asked
    // for them, once a process (Linux, Documentation/arch/x86/xstate.rst).
    constexpr unsigned TILES = 1 << 24 | 1 << 25 | 1 << 22, SAVED = 1 << 17 | 1 << 18, SAVES = 1 << 27;
    constexpr int ASK = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return LACKS;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & SAVES)) return LACKS;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & SAVED) != SAVED) return "the system does not save tiles";
    if (syscall(SYS_arch_prctl, ASK, TILE_DATA)) return "the system gives this process no permission for tiles (arch_prctl)";
#endif
    if (!is_right<W8A8, uint8_t, int8_t, int32_t>()) return "tiles gave wrong sums of 8 bits in a test";
    return is_right<BFLOAT16, uint16_t, uint16_t, float>() ? nullptr : "tiles gave wrong sums of bfloat16 in a test";
}

#else

void fly::begin_tiles(int) {}
void fly::multiply_tiles(const TileBlock&) {}
void fly::end_tiles() {}
const char* fly::why_no_tiles() { return "tiles take Linux, and GCC 11 or Clang 12 to build for them"; }

#endif
