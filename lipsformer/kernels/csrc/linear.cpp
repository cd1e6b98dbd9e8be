// What a linear layer behind GELU needs besides products: GELU's gradient and sums of rows.
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 1 << 12;  // floats of a map that is taken as one long row

}  // namespace

extern "C" {

// activated = GELU(z), grad *= GELU'(z).
void gelu_gradient(const float *z, float *grad, float *activated, int64_t n, int64_t threads) {
    if (n < ALONE) threads = 1;
    parallel_for(threads, (n + BLOCK - 1) / BLOCK, [=](int64_t block) {
        const int64_t start = block * BLOCK;
        each(std::min(BLOCK, n - start), [=](int64_t i, auto lanes) {
            const vec x = lanes.load(z + start + i);
            vec value, density;
            normal(x, value, density);
            float *g = grad + start + i;
            lanes.store(activated + start + i, x * value);
            lanes.store(g, lanes.load(g) * (value + x * density));
        });
    });
}

// The sum of the rows.
void row_sum(const float *x, float *total, int64_t rows, int64_t channels, int64_t threads) {
    const Parts parts(rows);
    std::vector<float> sums(parts.count * channels);
    float *const totals = sums.data();
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, parts.count, [=](int64_t part) {
        float *sum = totals + part * channels;
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row)
            each(channels, [=](int64_t i, auto lanes) {
                lanes.store(sum + i, lanes.load(sum + i) + lanes.load(x + row * channels + i));
            });
    });
    std::fill(total, total + channels, 0.0f);
    add_parts(sums.data(), parts.count, channels, total);
}

}  // extern "C"
