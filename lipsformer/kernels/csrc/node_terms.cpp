// What additive attention reads of the nodes' maps, [nodes, heads, channels]: the products with two
// weights per head, [heads, channels], and the squared norms, each [nodes, heads].
#include "rows.h"

namespace {

void node_terms(const float *x, const float *source_weight, const float *target_weight,
                float *source_term, float *target_term, float *squared_norm, int64_t nodes,
                int64_t heads, int64_t channels, int64_t threads) {
    if (nodes * heads * channels < ALONE) threads = 1;
    parallel_for(threads, nodes * heads, [=](int64_t row) {
        const float *from = x + row * channels;
        const float *source = source_weight + row % heads * channels;
        const float *target = target_weight + row % heads * channels;
        vec by_source = {}, by_target = {}, square = {};
        each(channels, [&](int64_t i, auto lanes) {
            const vec value = lanes.load(from + i);
            by_source += value * lanes.load(source + i);
            by_target += value * lanes.load(target + i);
            square += value * value;
        });
        source_term[row] = sum(by_source);
        target_term[row] = sum(by_target);
        squared_norm[row] = sum(square);
    });
}

// grad_x = grad + grad_source * source_weight + grad_target * target_weight + 2 grad_square * x, and
// the gradients of the weights: the sums over the nodes of grad_source * x and of grad_target * x.
void node_terms_gradients(const float *x, const float *source_weight, const float *target_weight,
                          const float *grad, const float *grad_source, const float *grad_target,
                          const float *grad_square, float *grad_x, float *grad_source_weight,
                          float *grad_target_weight, int64_t nodes, int64_t heads,
                          int64_t channels, int64_t threads) {
    const Parts parts(nodes);
    const int64_t width = heads * channels;
    std::vector<float> source_sums(parts.count * width), target_sums(parts.count * width);
    float *const source_parts = source_sums.data(), *const target_parts = target_sums.data();
    if (nodes * width < ALONE) threads = 1;
    parallel_for(threads, parts.count, [=](int64_t part) {
        for (int64_t row = parts.begin(part) * heads; row < parts.begin(part + 1) * heads; ++row) {
            const int64_t head = row % heads * channels;
            const float *source = source_weight + head, *target = target_weight + head;
            float *source_sum = source_parts + part * width + head;
            float *target_sum = target_parts + part * width + head;
            const float *from = x + row * channels, *incoming = grad + row * channels;
            float *to = grad_x + row * channels;
            const vec by_source = splat(grad_source[row]), by_target = splat(grad_target[row]);
            const vec twice = splat(2.0f * grad_square[row]);
            each(channels, [=](int64_t i, auto lanes) {
                const vec value = lanes.load(from + i);
                lanes.store(to + i, lanes.load(incoming + i) + by_source * lanes.load(source + i) +
                                        by_target * lanes.load(target + i) + twice * value);
                lanes.store(source_sum + i, lanes.load(source_sum + i) + by_source * value);
                lanes.store(target_sum + i, lanes.load(target_sum + i) + by_target * value);
            });
        }
    });
    std::fill(grad_source_weight, grad_source_weight + width, 0.0f);
    std::fill(grad_target_weight, grad_target_weight + width, 0.0f);
    add_parts(source_sums.data(), parts.count, width, grad_source_weight);
    add_parts(target_sums.data(), parts.count, width, grad_target_weight);
}

}  // namespace

EXPORT_FLOAT32(node_terms)
EXPORT_FLOAT32(node_terms_gradients)
