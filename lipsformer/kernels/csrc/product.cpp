// y = a b + bias in float32, and GELU of a or of y if asked.
//
// A tile of 6 x 16 sums stays in registers, with AVX-512 one of 14 x 16, which divides windows of 49
// tokens well. The 16 columns of b that it needs lie side by side, as a panel. Of a block of rows of
// a, a part of the inputs is copied and multiplied by all panels before the next part. So the copy
// stays in the second cache, and a panel's part in the first. While the first tile of a panel is
// computed, the next panel's part is fetched into the second cache.
#include "rows.h"

namespace {

constexpr int64_t ROWS = LANES == 16 ? 14 : 6, COLUMNS = 16, VECS = COLUMNS / LANES;
constexpr int64_t BLOCK_ROWS = LANES == 16 ? 98 : 96, DEPTH = 384;
constexpr int64_t STRIDE = DEPTH + 16;  // of the copied rows: no power of 2, where lines collide

// How b lies in memory.
enum Layout : int64_t {
    PLAIN,       // [inputs, outputs]
    TRANSPOSED,  // [outputs, inputs]
    PANELS,      // [panels, inputs, COLUMNS], zeros behind the last output
};

// What GELU is applied to.
enum Act : int64_t { NOTHING, OUTPUT, INPUT };

struct Product {
    const float *a;     // [rows, inputs], or its transpose
    const float *b;     // as layout says
    const float *bias;  // [outputs], or null
    float *y;           // [rows, outputs]
    int64_t rows, inputs, outputs;
    bool a_transposed;
    Layout layout;
    Act act;

    int64_t panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }

    // One panel of the transposed b, its inputs from begin to end - 1.
    void pack(int64_t panel, int64_t begin, int64_t end, float *packed) const {
        const int64_t column = panel * COLUMNS, columns = std::min(COLUMNS, outputs - column);
        if (columns < COLUMNS) std::fill_n(packed, (end - begin) * COLUMNS, 0.0f);
        transpose(b + column * inputs + begin, inputs, columns, end - begin, packed, COLUMNS);
    }

    // One input of all panels of the plain b.
    void pack_row(int64_t k, float *packed) const {
        const float *from = b + k * outputs;
        packed += k * COLUMNS;
        for (int64_t column = 0; column < outputs; column += COLUMNS, packed += inputs * COLUMNS) {
            if (column + COLUMNS <= outputs) {
                std::copy_n(from + column, COLUMNS, packed);
            } else {
                std::fill_n(packed, COLUMNS, 0.0f);
                std::copy_n(from + column, outputs - column, packed);
            }
        }
    }

    // n rows of a, or of GELU(a), the inputs from begin to end - 1.
    void copy_rows(int64_t row, int64_t n, int64_t begin, int64_t end, float *copy) const {
        if (a_transposed)
            return transpose(a + begin * rows + row, rows, end - begin, n, copy, STRIDE);
        for (int64_t i = 0; i < n; ++i, copy += STRIDE) {
            const float *from = a + (row + i) * inputs + begin;
            if (act == INPUT)
                each(end - begin, [=](int64_t k, auto lanes) {
                    lanes.store(copy + k, gelu(lanes.load(from + k)));
                });
            else
                std::copy_n(from, end - begin, copy);
        }
    }

    // The product of the rows and the panels from the first to the last but one.
    void compute(int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) const {
        // Together too large for the stack of a small thread.
        static thread_local float copy[BLOCK_ROWS * STRIDE], packed[DEPTH * COLUMNS];
        const int64_t parts = (inputs + DEPTH - 1) / DEPTH;
        for (; row < last_row; row += BLOCK_ROWS) {
            const int64_t n = std::min(BLOCK_ROWS, last_row - row);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = inputs * part / parts, end = inputs * (part + 1) / parts;
                copy_rows(row, n, begin, end, copy);
                for (int64_t p = panel; p < last_panel; ++p) {
                    if (layout != PANELS) pack(p, begin, end, packed);
                    const float *w = layout == PANELS ? b + (p * inputs + begin) * COLUMNS : packed;
                    const bool more = layout == PANELS && p + 1 < last_panel;
                    const float *next = more ? w + inputs * COLUMNS : w;
                    int64_t i = 0;
                    for (; i + ROWS <= n; i += ROWS, next = w)
                        tile<ROWS>(copy + i * STRIDE, w, next, row + i, p, begin, end);
                    rest<ROWS - 1>(n - i, copy + i * STRIDE, w, row + i, p, begin, end);
                }
            }
        }
    }

    // n rows, at most R.
    template <int64_t R>
    void rest(int64_t n, const float *copy, const float *w, int64_t row, int64_t panel,
              int64_t begin, int64_t end) const {
        if (n == R)
            tile<R>(copy, w, w, row, panel, begin, end);
        else if constexpr (R > 1)
            rest<R - 1>(n, copy, w, row, panel, begin, end);
    }

    // R rows, one panel, and the inputs from begin to end - 1. The panel at next is fetched.
    template <int64_t R>
    __attribute__((noinline)) void tile(const float *copy, const float *w, const float *next,
                                        int64_t row, int64_t panel, int64_t begin,
                                        int64_t end) const {
        // finish takes them by reference, and clang forgets there that a vec may lie anywhere.
        alignas(LANES * sizeof(float)) vec sums[R][VECS] = {};
#pragma GCC unroll 8
        for (int64_t k = 0; k < end - begin; ++k, w += COLUMNS, next += COLUMNS) {
            __builtin_prefetch(next, 0, 2);
            vec weights[VECS];
            for (int64_t v = 0; v < VECS; ++v) weights[v] = load(w + v * LANES);
            each_vector<R, VECS>([&](int64_t r, int64_t v) {
                sums[r][v] += splat(copy[r * STRIDE + k]) * weights[v];
            });
        }
        const bool first = begin == 0, last = end == inputs;
        const int64_t column = panel * COLUMNS, columns = std::min(COLUMNS, outputs - column);
        const float *offset = bias == nullptr ? nullptr : bias + column;
        float *to = y + row * outputs + column;
        if (columns == COLUMNS) return finish(sums, first, last, offset, to, outputs);
        float whole[R * COLUMNS] = {}, whole_offset[COLUMNS] = {};
        for (int64_t r = 0; r < R && !first; ++r)
            std::copy_n(to + r * outputs, columns, whole + r * COLUMNS);
        if (offset != nullptr) std::copy_n(offset, columns, whole_offset);
        finish(sums, first, last, whole_offset, whole, COLUMNS);
        for (int64_t r = 0; r < R; ++r) std::copy_n(whole + r * COLUMNS, columns, to + r * outputs);
    }

    // Add the bias to the sums of the first part, and what lies in y to those of the others.
    template <int64_t R>
    void finish(vec (&sums)[R][VECS], bool first, bool last, const float *offset, float *to,
                int64_t stride) const {
        if (!first)
            each_vector<R, VECS>([&](int64_t r, int64_t v) {
                sums[r][v] += load(to + r * stride + v * LANES);
            });
        else if (offset != nullptr)
            each_vector<R, VECS>([&](int64_t r, int64_t v) { sums[r][v] += load(offset + v * LANES); });
        each_vector<R, VECS>([&](int64_t r, int64_t v) {
            store(to + r * stride + v * LANES, sums[r][v]);
        });
        for (int64_t r = 0; r < R && last && act == OUTPUT; ++r)
            each(COLUMNS, [&](int64_t i, auto lanes) {
                lanes.store(to + r * stride + i, gelu(lanes.load(to + r * stride + i)));
            });
    }

    void run(int64_t threads) const {
        const int64_t tiles = (rows + ROWS - 1) / ROWS, count = panels();
        // A thread has a share of the rows or of the panels, whichever are more.
        parallel(threads, [=, product = *this](const Team &team) {
            if (tiles > count)
                product.compute(team.begin(tiles) * ROWS,
                                std::min(team.end(tiles) * ROWS, product.rows), 0, count);
            else
                product.compute(0, product.rows, team.begin(count), team.end(count));
        });
    }
};

void product(const float *a, const float *b, const float *bias, float *y, int64_t rows,
             int64_t inputs, int64_t outputs, int64_t a_transposed, int64_t layout, int64_t act,
             int64_t threads) {
    Product p{a, b, bias, y, rows, inputs, outputs, a_transposed != 0, Layout(layout), Act(act)};
    if (rows * inputs * outputs < COLUMNS * ALONE) threads = 1;
    std::unique_ptr<float[]> packed;
    // Of a transposed b each panel is packed where it is needed if that is once or twice.
    if (layout == PLAIN || (layout == TRANSPOSED && rows > 2 * BLOCK_ROWS)) {
        packed.reset(new float[p.panels() * inputs * COLUMNS]);
        float *const to = packed.get();
        if (layout == PLAIN)
            parallel_for(threads, inputs, [=](int64_t k) { p.pack_row(k, to); });
        else
            parallel_for(threads, p.panels(), [=](int64_t panel) {
                p.pack(panel, 0, inputs, to + panel * inputs * COLUMNS);
            });
        p.b = to;
        p.layout = PANELS;
    }
    p.run(threads);
}

}  // namespace

EXPORT_FLOAT32(product)
