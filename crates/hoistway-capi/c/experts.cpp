// What the C++ header promises of models larger than memory. Usage: experts MODEL.gguf, as for experts.c.
#include "../include/hoistway.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace experts = hoistway::experts;

static void check(bool condition, const char* what) {
    if (!condition) {
        std::fprintf(stderr, "not so: %s\n", what);
        std::exit(1);
    }
}

template <typename Work> static hoistway_status thrown(Work&& work) {
    try {
        work();
    } catch (const hoistway::Error& error) {
        return error.status();
    }
    return HOISTWAY_OK;
}

int main(int, char** arguments) {
    hoistway::Catalog catalog({arguments[1]});
    experts::Store store(catalog, experts::Options(1 << 20));
    const hoistway_experts_model model = store.describe();
    const std::vector<hoistway_experts_layer_info> layers = store.layers();
    check(model.layers == layers.size() && layers.back().layer == 2, "layers are described");
    check(store.parts(0, 1).size() == 3, "so are parts");
    store.observe(0, {1, 4}, {0.5f, 0.5f});
    experts::Lease lease = store.ensure(0, {1, 4});
    check(lease.size() == 2 && lease.parts(1).size() == 3, "a lease has what was asked for");
    check(store.is_resident(0, 4) && !store.is_resident(0, 5), "that is resident");
    check(store.evict(0, {1, 4}) == 0, "what is leased stays");
    lease = store.ensure_tensors({"token_embd.weight"});
    check(lease.part(0, 0).bytes == 50 * 16 * 4 && store.is_resident("token_embd.weight"), "so is a tensor");
    check(store.evict(0, {1, 4}) == 2, "what was released goes");
    lease.reset();
    check(store.evict({"token_embd.weight"}) == 1, "so does a tensor");
    store.prefetch(1, {0});
    store.cancel_before(1);
    store.set_budget(2 << 20);
    check(!store.tensor_address("blk.0.ffn_up_exps.weight"), "slots have no place for a stacked tensor");
    check(store.stats().find("\"budget_bytes\":2097152") != std::string::npos, "it says what it did");
    check(store.events().find("\"events\":[]") != std::string::npos, "no event is kept unless asked for");
    check(thrown([&] { store.ensure(9, {0}); }) == HOISTWAY_NOT_FOUND, "what is not there throws");

    hoistway::Reader reader;
    experts::Rows rows(reader, catalog, "token_embd.weight");
    check(rows.size() == 50 && rows.gather({3, 3}).size() == 2 * rows.row_bytes(), "rows are gathered");
    experts::Layers stream(reader, catalog, experts::LayersOptions(1 << 20));
    for (const char* name : {"blk.0", "blk.1", "blk.2", "blk.0"}) {
        experts::Layer layer = stream.next();
        check(layer.name() == name && layer.tensors().size() == 5, "layers come in their order");
        try {
            layer.used_behind(nullptr);
            check(false, "a layer in host memory has no stream");
        } catch (const hoistway::Error& error) {
            check(error.status() == HOISTWAY_INVALID_ARGUMENT, "a layer in host memory says so");
        }
    }
    check(stream.stats().find("\"served\":4") != std::string::npos, "they are counted");
    std::puts("ok");
}
