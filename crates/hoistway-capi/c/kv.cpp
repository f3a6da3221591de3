// What the C++ header promises of the KV store. Usage: kv DIRECTORY: an empty one.
#include "../include/hoistway.hpp"

#include <poll.h>

#include <cstdio>
#include <cstdlib>

namespace kv = hoistway::kv;

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
    kv::Options options(arguments[1], 64 << 20);
    options.min_free_bytes = 1;
    options.durability = "none";
    kv::Store store(options);
    kv::Namespace blocks = store.open(kv::Description("m@1"));
    const std::vector<hoistway_kv_key> keys = {kv::key("a"), kv::key("b"), kv::key("c")};
    std::vector<std::string> source = {std::string(100000, 'a'), std::string(100000, 'b')};
    std::vector<std::string> target(2, std::string(100000, 0));
    kv::Region region = store.add(kv::host(source[0].data(), source[0].size()));
    check(!region.is_direct(), "memory of the host is read as it is");

    kv::Items items;
    items.add("a", source[0].data(), source[0].size());
    items.add("b", {kv::host(source[1].data(), 10), kv::host(source[1].data() + 10, 99990)});
    kv::Request request;
    request.flags = HOISTWAY_KV_NOTIFY;
    kv::Ticket stored = blocks.store(items, HOISTWAY_BACKGROUND, request);
    pollfd watched = {store.event_fd(), POLLIN, 0};
    check(poll(&watched, 1, 60000) == 1, "the end is told");
    check(store.drain() == std::vector<std::uint64_t>{stored.id()} && store.drain().empty(), "once");
    stored.wait();
    store.flush();
    check(blocks.lookup(keys) == std::vector<std::uint8_t>{1, 1, 0}, "what is there is found");
    check(blocks.lookup({}).empty(), "no answer to no question");
    check(blocks.lookup_prefix(keys) == 2 && blocks.lookup_reverse(keys) == std::uint64_t(1), "so are runs");
    check(!blocks.lookup_reverse({kv::key("c")}), "what is not there is not found");

    kv::Items places;
    places.add("a", target[0].data(), target[0].size());
    places.add("b", target[1].data(), target[1].size());
    kv::Ticket loaded = blocks.load(places);
    loaded.wait();
    check(loaded.wait_for(0) && loaded.poll() == HOISTWAY_OK && loaded.wait_released(), "it has ended");
    check(loaded.is_released() && target == source, "the bytes are those that were stored");
    check(loaded.report().find("\"bytes\":200000") != std::string::npos, "there is a report");
    places.add("c", target[0].data(), target[0].size());
    kv::Ticket missed = blocks.load(places);
    check(thrown([&] { missed.wait(); }) == HOISTWAY_NOT_FOUND, "a miss throws");
    check(missed.outcomes()[0].status == HOISTWAY_KV_OK, "others are loaded");
    check(missed.outcomes()[2].status == HOISTWAY_KV_MISS, "and the outcome says which");
    check(blocks.remove({kv::key("a"), kv::key("c")}) == 1, "what is there is removed");
    for (const std::string& words : {store.stats(), store.report(), store.events(), store.metrics()}) {
        check(words.size() > 1, "it says what it did");
    }
    store.close();
    check(thrown([&] { blocks.lookup(keys); }) == HOISTWAY_CLOSED, "a store that was closed says so");
    kv::FarOptions far(nullptr);
    options.far_tier = &far;
    check(thrown([&] { kv::Store none(options); }) == HOISTWAY_INVALID_ARGUMENT, "a far tier has a root");
    check(thrown([] { kv::Store none(kv::Options(nullptr)); }) == HOISTWAY_INVALID_ARGUMENT, "misuse throws");
    std::puts("ok");
}
