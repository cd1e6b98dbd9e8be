// CenterNorm and its gradients, each in one pass over the map.
#include "rows.h"

namespace {

// y = gain * (x - mean(x)) + shift, where shift is one row (stride 0) or a map.
template <class Value, class Shift = float>
void center(const Value *x, const float *gain, const Shift *shift, int64_t shift_stride, Value *y,
            int64_t rows, int64_t channels, int64_t threads) {
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, rows, [=](int64_t row) {
        const Value *from = x + row * channels;
        const Shift *add = shift + row * shift_stride;
        Value *to = y + row * channels;
        vec total = {};
        each(channels, [&](int64_t i, auto lanes) { total += lanes.load(from + i); });
        const float mean = sum(total) / channels;
        each(channels, [=](int64_t i, auto lanes) {
            lanes.store(to + i, (lanes.load(from + i) - mean) * lanes.load(gain + i) +
                                    lanes.load(add + i));
        });
    });
}

template <class Value>
constexpr auto center_map = center<Value, Value>;

// grad_x = c - mean(c) of c = gain * grad; the sums of grad * (y - bias) and of grad over the rows.
template <class Value>
void center_gradients(const Value *grad, const Value *y, const float *gain, const float *bias,
                      Value *grad_x, float *grad_offset, float *grad_bias, int64_t rows,
                      int64_t channels, int64_t threads) {
    const Parts parts(rows);
    std::vector<float> offsets(parts.count * channels), biases(parts.count * channels);
    float *const offset_parts = offsets.data(), *const bias_parts = biases.data();
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, parts.count, [=](int64_t part) {
        float *offset_sum = offset_parts + part * channels;
        float *bias_sum = bias_parts + part * channels;
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row) {
            const Value *from = grad + row * channels, *output = y + row * channels;
            Value *to = grad_x + row * channels;
            vec total = {};
            each(channels, [&](int64_t i, auto lanes) {
                const vec g = lanes.load(from + i);
                total += g * lanes.load(gain + i);
                const vec offset = lanes.load(output + i) - lanes.load(bias + i);
                lanes.store(offset_sum + i, lanes.load(offset_sum + i) + g * offset);
                lanes.store(bias_sum + i, lanes.load(bias_sum + i) + g);
            });
            const float mean = sum(total) / channels;
            each(channels, [=](int64_t i, auto lanes) {
                lanes.store(to + i, lanes.load(from + i) * lanes.load(gain + i) - mean);
            });
        }
    });
    std::fill(grad_offset, grad_offset + channels, 0.0f);
    std::fill(grad_bias, grad_bias + channels, 0.0f);
    add_parts(offsets.data(), parts.count, channels, grad_offset);
    add_parts(biases.data(), parts.count, channels, grad_bias);
}

}  // namespace

EXPORT(center)
EXPORT(center_map)
EXPORT(center_gradients)
