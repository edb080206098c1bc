// Tiles in plain C++: the instructions that fly/backends/cpu/src/amx.cpp uses, under the names of their intrinsics, for
// processors without them. Only test builds include it (tests/sanitizers.py). Shapes are checked as a processor would,
// and a fault ends the process. Loads and stores are ordinary memory accesses, which sanitizers see.
//
// Formulas: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, at each instruction.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

struct Emulated {
    int rows, bytes;  // 0: not configured
    alignas(64) char data[16][64];
};

thread_local Emulated emulated[8];

}  // namespace

// 1, 2: products of 8 bits, or of bfloat16, are wrong.
extern "C" __attribute__((visibility("default"))) int fly_tile_error;
int fly_tile_error;

namespace {

#define TILE_FAULT(...) (fprintf(stderr, "tile fault: " __VA_ARGS__), fputc('\n', stderr), abort())

Emulated& tile(int number) {
    if (number < 0 || number > 7 || !emulated[number].rows) TILE_FAULT("tile %d has no shape in this thread", number);
    return emulated[number];
}

void _tile_release() { memset((void*)emulated, 0, sizeof(emulated)); }

void _tile_loadconfig(const void* from) {
    uint8_t config[64];
    memcpy(config, from, 64);
    _tile_release();
    if (config[0] != 1) TILE_FAULT("palette %d", config[0]);
    for (int i = 1; i < 64; i++) {
        const bool used = (i >= 16 && i < 32) || (i >= 48 && i < 56);
        if (!used && config[i]) TILE_FAULT("byte %d of the configuration is %d", i, config[i]);
    }
    for (int i = 0; i < 8; i++) {
        const int rows = config[48 + i], bytes = config[16 + 2 * i] | config[17 + 2 * i] << 8;
        if (rows > 16 || bytes > 64 || bytes % 4 || !rows != !bytes) TILE_FAULT("tile %d of %d rows by %d bytes", i, rows, bytes);
        emulated[i].rows = rows, emulated[i].bytes = bytes;
    }
}

void _tile_zero(int number) { memset(tile(number).data, 0, sizeof(Emulated::data)); }

void _tile_loadd(int number, const void* from, long stride) {
    Emulated& to = tile(number);
    for (int i = 0; i < to.rows; i++) memcpy(to.data[i], (const char*)from + i * stride, to.bytes);
}

void _tile_stored(int number, void* to, long stride) {
    const Emulated& from = tile(number);
    for (int i = 0; i < from.rows; i++) memcpy((char*)to + i * stride, from.data[i], from.bytes);
}

// The shapes of a product: sums [M, N], rows [M, steps of K], weights [steps of K, N], 4 bytes each.
void check_product(int into, int rows, int weights) {
    const Emulated &sums = tile(into), &a = tile(rows), &b = tile(weights);
    if (into == rows || into == weights || rows == weights) TILE_FAULT("product of tiles %d and %d in %d", rows, weights, into);
    if (sums.rows != a.rows || sums.bytes != b.bytes || a.bytes != 4 * b.rows)
        TILE_FAULT("product of [%d, %d] by [%d, %d] in [%d, %d]", a.rows, a.bytes, b.rows, b.bytes, sums.rows, sums.bytes);
}

// Arithmetic that touches nothing but tiles, whose shapes are checked by then. No sanitizer looks at each of its numbers,
// and it takes vectors (every processor of the kernels ``amx`` has these): else it would take fifty times as long.
#define UNSEEN                                                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), \
                   no_sanitize("address", "undefined", "thread")))

typedef int32_t Whole __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

UNSEEN void add_whole(Emulated& sums, const Emulated& a, const Emulated& b) {
    Whole wide[16][4];  // the weights of each step
    for (int k = 0; k < b.rows; k++) {
        Bits four;
        memcpy(&four, b.data[k], 64);
        for (int j = 0; j < 4; j++) wide[k][j] = (Whole)(four << (24 - 8 * j)) >> 24;
    }
    for (int m = 0; m < a.rows; m++) {
        Bits sum;  // wraps, as the instruction does
        memcpy(&sum, sums.data[m], 64);
        for (int k = 0; k < b.rows; k++)
            for (int j = 0; j < 4; j++) sum += (Bits)(wide[k][j] * (int32_t)(uint8_t)a.data[m][4 * k + j]);
        sum[0] += fly_tile_error == 1;
        memcpy(sums.data[m], &sum, 64);
    }
}

// The first or second (``j``) bfloat16 of four bytes. Denormal inputs and results count as 0.
UNSEEN inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
UNSEEN inline float widened(uint32_t two, int j) {
    const uint32_t bits = j ? two & 0xffff0000 : two << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return flushed(wide);
}

// Sums of even and of odd inputs are added at the end.
UNSEEN void add_bfloat16(Emulated& sums, const Emulated& a, const Emulated& b) {
    float wide[16][2][16];
    for (int k = 0; k < b.rows; k++) {
        uint32_t two[16];
        memcpy(two, b.data[k], 64);
        for (int j = 0; j < 2; j++)
            for (int n = 0; n < 16; n++) wide[k][j][n] = widened(two[n], j);
    }
    for (int m = 0; m < a.rows; m++) {
        float parts[2][16] = {}, sum[16];
        for (int k = 0; k < b.rows; k++)
            for (int j = 0; j < 2; j++) {
                uint32_t two;
                memcpy(&two, a.data[m] + 4 * k, 4);
                const float x = widened(two, j);
                for (int n = 0; n < 16; n++) parts[j][n] = flushed(fmaf(x, wide[k][j][n], parts[j][n]));
            }
        memcpy(sum, sums.data[m], 64);
        for (int n = 0; n < 16; n++) sum[n] = flushed(flushed(sum[n]) + flushed(parts[0][n] + parts[1][n]));
        if (fly_tile_error == 2) sum[0] += 1;
        memcpy(sums.data[m], sum, 64);
    }
}

void _tile_dpbusd(int into, int rows, int weights) {
    check_product(into, rows, weights);
    add_whole(tile(into), tile(rows), tile(weights));
}

void _tile_dpbf16ps(int into, int rows, int weights) {
    check_product(into, rows, weights);
    add_bfloat16(tile(into), tile(rows), tile(weights));
}

}  // namespace
