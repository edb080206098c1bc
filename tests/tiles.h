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
void check_product(const Emulated& sums, const Emulated& a, const Emulated& b) {
    if (sums.rows != a.rows || sums.bytes != b.bytes || a.bytes != 4 * b.rows)
        TILE_FAULT("product of [%d, %d] by [%d, %d] in [%d, %d]", a.rows, a.bytes, b.rows, b.bytes, sums.rows, sums.bytes);
}

void _tile_dpbusd(int into, int rows, int weights) {
    Emulated& sums = tile(into);
    const Emulated &a = tile(rows), &b = tile(weights);
    check_product(sums, a, b);
    int32_t wide[16][64];  // the weights of each step
    for (int k = 0; k < b.rows; k++)
        for (int i = 0; i < b.bytes; i++) wide[k][i % 4 * 16 + i / 4] = (int8_t)b.data[k][i];
    for (int m = 0; m < a.rows; m++) {
        uint32_t sum[16];  // wraps, as the instruction does
        memcpy(sum, sums.data[m], 64);
        for (int k = 0; k < b.rows; k++)
            for (int j = 0; j < 4; j++)
                for (int n = 0; n < 16; n++) sum[n] += (uint32_t)((uint8_t)a.data[m][4 * k + j] * wide[k][j * 16 + n]);
        sum[0] += fly_tile_error == 1;
        memcpy(sums.data[m], sum, sums.bytes);
    }
}

// Denormal inputs and results count as 0. Sums of even and of odd inputs are added at the end.
float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

void _tile_dpbf16ps(int into, int rows, int weights) {
    Emulated& sums = tile(into);
    const Emulated &a = tile(rows), &b = tile(weights);
    check_product(sums, a, b);
    const auto widened = [](const char* at) {
        uint16_t half;
        memcpy(&half, at, 2);
        const uint32_t bits = (uint32_t)half << 16;
        float wide;
        memcpy(&wide, &bits, 4);
        return flushed(wide);
    };
    float wide[16][2][16] = {};
    for (int k = 0; k < b.rows; k++)
        for (int i = 0; i < b.bytes / 2; i++) wide[k][i % 2][i / 2] = widened(b.data[k] + 2 * i);
    for (int m = 0; m < a.rows; m++) {
        float parts[2][16] = {}, sum[16];
        for (int k = 0; k < b.rows; k++)
            for (int j = 0; j < 2; j++) {
                const float x = widened(a.data[m] + 4 * k + 2 * j);
                for (int n = 0; n < 16; n++) parts[j][n] = flushed(fmaf(x, wide[k][j][n], parts[j][n]));
            }
        memcpy(sum, sums.data[m], 64);
        for (int n = 0; n < 16; n++) sum[n] = flushed(flushed(sum[n]) + flushed(parts[0][n] + parts[1][n]));
        if (fly_tile_error == 2) sum[0] += 1;
        memcpy(sums.data[m], sum, sums.bytes);
    }
}

}  // namespace
