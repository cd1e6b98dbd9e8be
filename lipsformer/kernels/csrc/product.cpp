// y = x W^T + b, and GELU of it if asked, in float32 for processors with AVX2 but no AVX-512.
//
// A tile of 6 x 16 sums stays in registers. In the weight's copy 16 outputs lie side by side, as a
// panel. Of a block of rows, a part of the inputs is copied and multiplied by all panels before the
// next part. So the copy stays in the second cache, and a panel's part in the first.
#include "rows.h"

namespace {

constexpr int64_t ROWS = 6, COLUMNS = 16, VECS = COLUMNS / LANES;
constexpr int64_t BLOCK_ROWS = 96, DEPTH = 384;
constexpr int64_t STRIDE = DEPTH + 16;  // of the copied rows: no power of 2, where lines collide

// f(r, v) for the R rows and the vectors of a tile.
template <int64_t R, class F>
inline void each_vector(F f) {
#pragma GCC unroll 6
    for (int64_t r = 0; r < R; ++r)
        for (int64_t v = 0; v < VECS; ++v) f(r, v);
}

struct Product {
    const float *x, *panels, *bias;  // [rows, inputs], [panels, inputs, COLUMNS], [outputs] or null
    float *y;                        // [rows, outputs]
    int64_t rows, inputs, outputs;
    bool act;

    // The product of the rows and the panels from the first to the last but one.
    void compute(int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) const {
        float copy[BLOCK_ROWS * STRIDE];
        const int64_t parts = (inputs + DEPTH - 1) / DEPTH;
        for (; row < last_row; row += BLOCK_ROWS) {
            const int64_t n = std::min(BLOCK_ROWS, last_row - row);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = inputs * part / parts, end = inputs * (part + 1) / parts;
                for (int64_t i = 0; i < n; ++i)
                    std::copy_n(x + (row + i) * inputs + begin, end - begin, copy + i * STRIDE);
                for (int64_t p = panel; p < last_panel; ++p) {
                    int64_t i = 0;
                    for (; i + ROWS <= n; i += ROWS)
                        tile<ROWS>(copy + i * STRIDE, row + i, p, begin, end);
                    rest<ROWS - 1>(n - i, copy + i * STRIDE, row + i, p, begin, end);
                }
            }
        }
    }

    // n rows, at most R.
    template <int64_t R>
    void rest(int64_t n, const float *copy, int64_t row, int64_t panel, int64_t begin,
              int64_t end) const {
        if (n == R)
            tile<R>(copy, row, panel, begin, end);
        else if constexpr (R > 1)
            rest<R - 1>(n, copy, row, panel, begin, end);
    }

    // R rows, one panel, and the inputs from begin to end - 1.
    template <int64_t R>
    __attribute__((noinline)) void tile(const float *copy, int64_t row, int64_t panel,
                                        int64_t begin, int64_t end) const {
        const float *w = panels + (panel * inputs + begin) * COLUMNS;
        vec sums[R][VECS] = {};
#pragma GCC unroll 8
        for (int64_t k = 0; k < end - begin; ++k, w += COLUMNS) {
            vec weights[VECS];
            for (int64_t v = 0; v < VECS; ++v) weights[v] = load(w + v * LANES);
            each_vector<R>([&](int64_t r, int64_t v) {
                sums[r][v] += splat(copy[r * STRIDE + k]) * weights[v];
            });
        }
        const bool first = begin == 0, last = end == inputs;
        const int64_t column = panel * COLUMNS, columns = std::min(COLUMNS, outputs - column);
        const float *offset = bias == nullptr ? nullptr : bias + column;
        float *to = y + row * outputs + column;
        if (columns == COLUMNS) return finish(sums, first, last, offset, to, outputs);
        float own[R * COLUMNS] = {}, own_offset[COLUMNS] = {};
        for (int64_t r = 0; r < R && !first; ++r)
            std::copy_n(to + r * outputs, columns, own + r * COLUMNS);
        if (offset != nullptr) std::copy_n(offset, columns, own_offset);
        finish(sums, first, last, own_offset, own, COLUMNS);
        for (int64_t r = 0; r < R; ++r) std::copy_n(own + r * COLUMNS, columns, to + r * outputs);
    }

    // Add the bias to the sums of the first part, and what lies in y to those of the others.
    template <int64_t R>
    void finish(vec (&sums)[R][VECS], bool first, bool last, const float *offset, float *to,
                int64_t stride) const {
        if (!first)
            each_vector<R>([&](int64_t r, int64_t v) {
                sums[r][v] += load(to + r * stride + v * LANES);
            });
        else if (offset != nullptr)
            each_vector<R>([&](int64_t r, int64_t v) { sums[r][v] += load(offset + v * LANES); });
        each_vector<R>([&](int64_t r, int64_t v) {
            store(to + r * stride + v * LANES, sums[r][v]);
        });
        for (int64_t r = 0; r < R && last && act; ++r)
            each(COLUMNS, [&](int64_t i, auto lanes) {
                lanes.store(to + r * stride + i, gelu(lanes.load(to + r * stride + i)));
            });
    }
};

}  // namespace

extern "C" void packed_linear_float32(const float *x, const float *panels, const float *bias,
                                      float *y, int64_t rows, int64_t inputs, int64_t outputs,
                                      int64_t act, int64_t threads) {
    const Product product{x, panels, bias, y, rows, inputs, outputs, act != 0};
    const int64_t tiles = (rows + ROWS - 1) / ROWS, count = (outputs + COLUMNS - 1) / COLUMNS;
    if (rows * outputs < ALONE) threads = 1;
    // A thread has a share of the rows or of the panels, whichever are more.
    parallel(threads, [=](const Team &team) {
        if (tiles > count)
            product.compute(team.begin(tiles) * ROWS, std::min(team.end(tiles) * ROWS, rows), 0,
                            count);
        else
            product.compute(0, rows, team.begin(count), team.end(count));
    });
}
