// A storage back-end of NIXL that keeps objects as blocks of a hoistway KV store: an object's name is a block's key.
//
// It is a thin layer: descriptors become items of the C ABI, whose memory they name, and nothing is copied here.
// docs/kv/nixl.md says how to use it.
#include "backend/backend_plugin.h"

#include <hoistway.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <deque>
#include <limits>
#include <stdexcept>
#include <tuple>

namespace {

namespace kv = hoistway::kv;

constexpr const char* PLUGIN_NAME = "HOISTWAY";

// Members of hoistway_kv_options and hoistway_kv_description, by the names of the back-end's parameters.
struct Text {
    const char* name;
    const char* hoistway_kv_options::*option;
    const char* hoistway_kv_description::*field;
};
constexpr Text TEXTS[] = {
    {"root", &hoistway_kv_options::root, nullptr},
    {"access", &hoistway_kv_options::access, nullptr},
    {"layout", &hoistway_kv_options::layout, nullptr},
    {"durability", &hoistway_kv_options::durability, nullptr},
    {"eviction", &hoistway_kv_options::eviction, nullptr},
    {"admission", &hoistway_kv_options::admission, nullptr},
    {"route", &hoistway_kv_options::route, nullptr},
    {"direct", &hoistway_kv_options::direct, nullptr},
    {"namespace.model", nullptr, &hoistway_kv_description::model},
    {"namespace.dtype", nullptr, &hoistway_kv_description::dtype},
    {"namespace.layout", nullptr, &hoistway_kv_description::layout},
    {"namespace.key_algorithm", nullptr, &hoistway_kv_description::key_algorithm},
    {"namespace.salt", nullptr, &hoistway_kv_description::salt},
};
struct Number {
    const char* name;
    std::uint64_t hoistway_kv_options::*option = nullptr;
    std::uint64_t hoistway_kv_description::*field = nullptr;
    std::uint32_t hoistway_kv_description::*count = nullptr;

    void set(kv::Options& options, kv::Description& description, std::uint64_t value) const {
        if (option) {
            options.*option = value;
        } else if (field) {
            description.*field = value;
        } else if (value <= std::numeric_limits<std::uint32_t>::max()) {
            description.*count = static_cast<std::uint32_t>(value);
        } else {
            throw std::invalid_argument("the parameter " + std::string(name) + " is too large: " + std::to_string(value));
        }
    }
};
constexpr Number NUMBERS[] = {
    {"capacity_bytes", &hoistway_kv_options::capacity_bytes, nullptr},
    {"min_free_bytes", &hoistway_kv_options::min_free_bytes, nullptr},
    {"segment_bytes", &hoistway_kv_options::segment_bytes, nullptr},
    {"io_threads", &hoistway_kv_options::io_threads, nullptr},
    {"max_in_flight_bytes", &hoistway_kv_options::max_in_flight_bytes, nullptr},
    {"timeout_ms", &hoistway_kv_options::timeout_ms, nullptr},
    {"partial_timeout_ms", &hoistway_kv_options::partial_timeout_ms, nullptr},
    {"scrub_bytes_per_second", &hoistway_kv_options::scrub_bytes_per_second, nullptr},
    {"namespace.ttl_ms", nullptr, &hoistway_kv_description::ttl_ms},
    {"namespace.quota_bytes", nullptr, &hoistway_kv_description::quota_bytes},
    {"namespace.layers", nullptr, nullptr, &hoistway_kv_description::layers},
    {"namespace.kv_heads", nullptr, nullptr, &hoistway_kv_description::kv_heads},
    {"namespace.head_dim", nullptr, nullptr, &hoistway_kv_description::head_dim},
    {"namespace.block_tokens", nullptr, nullptr, &hoistway_kv_description::block_tokens},
    {"namespace.tensor_rank", nullptr, nullptr, &hoistway_kv_description::tensor_rank},
    {"namespace.tensor_ranks", nullptr, nullptr, &hoistway_kv_description::tensor_ranks},
    {"namespace.pipeline_rank", nullptr, nullptr, &hoistway_kv_description::pipeline_rank},
    {"namespace.pipeline_ranks", nullptr, nullptr, &hoistway_kv_description::pipeline_ranks},
    {"namespace.context_rank", nullptr, nullptr, &hoistway_kv_description::context_rank},
    {"namespace.context_ranks", nullptr, nullptr, &hoistway_kv_description::context_ranks},
};

// The store and the namespace that the parameters name. Those that are empty are defaults.
struct Opened {
    kv::Store store;
    kv::Namespace blocks;

    static Opened open(const nixl_b_params_t& params) {
        kv::Options options(nullptr);
        // Never reached: the engine bounds what is under way by its memory, and does not try a refused store again.
        options.max_in_flight_bytes = std::uint64_t(1) << 40;
        kv::Description description("");
        for (const auto& [name, value] : params) {
            if (!value.empty()) {
                set(options, description, name, value);
            }
        }
        kv::Store store(options);
        kv::Namespace blocks = store.open(description);
        return {std::move(store), std::move(blocks)};
    }

  private:
    static void set(kv::Options& options, kv::Description& description, const std::string& name,
                    const std::string& value) {
        for (const Text& text : TEXTS) {
            if (name == text.name) {
                (text.option ? options.*text.option : description.*text.field) = value.c_str();
                return;
            }
        }
        for (const Number& number : NUMBERS) {
            if (name == number.name) {
                std::uint64_t parsed = 0;
                auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
                if (error != std::errc() || end != value.data() + value.size()) {
                    throw std::invalid_argument("the parameter " + name + " is no number: " + value);
                }
                number.set(options, description, parsed);
                return;
            }
        }
        throw std::invalid_argument("there is no parameter " + name);
    }
};

// What was registered: an object by its name, or memory of a device that the store was told of.
struct Registered : nixlBackendMD {
    explicit Registered(nixl_mem_t mem) : nixlBackendMD(true), mem(mem) {}
    nixl_mem_t mem;
    std::string key;
    std::optional<kv::Region> region;
};

// A request: its items, and its ticket once it was posted.
struct Request : nixlBackendReqH {
    explicit Request(nixl_xfer_op_t operation) : operation(operation) {}
    nixl_xfer_op_t operation;
    std::deque<std::string> keys;
    kv::Items items;
    std::optional<kv::Ticket> ticket;
};

nixl_status_t status_of(hoistway_status status) {
    switch (status) {
    case HOISTWAY_OK:
        return NIXL_SUCCESS;
    case HOISTWAY_PENDING:
        return NIXL_IN_PROG;
    case HOISTWAY_NOT_FOUND:
        return NIXL_ERR_NOT_FOUND;
    case HOISTWAY_INVALID_ARGUMENT:
        return NIXL_ERR_MISMATCH;
    case HOISTWAY_REFUSED:
    case HOISTWAY_READ_ONLY:
        return NIXL_ERR_NOT_ALLOWED;
    case HOISTWAY_TIMED_OUT:
    case HOISTWAY_CANCELLED:
        return NIXL_ERR_CANCELED;
    default:
        return NIXL_ERR_BACKEND;
    }
}

// Lets no exception out, and says on the standard error what it was.
template <typename Work> nixl_status_t guarded(const char* what, Work&& work) noexcept {
    try {
        return work();
    } catch (const hoistway::Error& error) {
        std::fprintf(stderr, "hoistway: %s: %s\n", what, error.what());
        return error.status() == HOISTWAY_INVALID_ARGUMENT ? NIXL_ERR_INVALID_PARAM : status_of(error.status());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "hoistway: %s: %s\n", what, error.what());
        return NIXL_ERR_INVALID_PARAM;
    }
}

// The key of an object: the name that the caller gave it, or its number.
std::string key_of(const nixlBlobDesc& object) {
    return object.metaInfo.empty() ? std::to_string(object.devId) : object.metaInfo;
}

hoistway_kv_piece piece_of(nixl_mem_t mem, const nixlBasicDesc& memory) {
    void* address = reinterpret_cast<void*>(memory.addr);
    return mem == VRAM_SEG ? kv::cuda(static_cast<int>(memory.devId), address, memory.len)
                           : kv::host(address, memory.len);
}

class Engine final : public nixlBackendEngine {
  public:
    explicit Engine(const nixlBackendInitParams* params)
        : nixlBackendEngine(params), opened_(Opened::open(*params->customParams)) {}

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }
    nixl_mem_list_t getSupportedMems() const override { return mems(); }
    static nixl_mem_list_t mems() { return {DRAM_SEG, VRAM_SEG, OBJ_SEG}; }

    nixl_status_t registerMem(const nixlBlobDesc& memory, const nixl_mem_t& mem, nixlBackendMD*& out) override {
        return guarded("registering memory", [&] {
            auto registered = std::make_unique<Registered>(mem);
            if (mem == OBJ_SEG) {
                registered->key = key_of(memory);
            } else if (mem == VRAM_SEG) {
                registered->region.emplace(opened_.store.add(piece_of(mem, memory)));
            } else if (mem != DRAM_SEG) {
                return NIXL_ERR_NOT_SUPPORTED;
            }
            out = registered.release();
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t deregisterMem(nixlBackendMD* registered) override {
        delete registered;
        return NIXL_SUCCESS;
    }

    nixl_status_t connect(const std::string&) override { return NIXL_SUCCESS; }
    nixl_status_t disconnect(const std::string&) override { return NIXL_SUCCESS; }
    nixl_status_t unloadMD(nixlBackendMD*) override { return NIXL_SUCCESS; }

    // The other side of a transfer is this agent, too.
    nixl_status_t loadLocalMD(nixlBackendMD* registered, nixlBackendMD*& out) override {
        out = registered;
        return NIXL_SUCCESS;
    }

    // Descriptors of one object are pieces of one item, in the order of their places in the object: these must be without
    // gaps from its start, as blocks are read and written whole.
    nixl_status_t prepXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local,
                           const nixl_meta_dlist_t& remote, const std::string& remote_agent,
                           nixlBackendReqH*& handle, const nixl_opt_b_args_t*) const override {
        return guarded("preparing a transfer", [&] {
            const auto count = static_cast<std::size_t>(remote.descCount());
            const nixl_mem_t mem = local.getType();
            if (remote_agent != localAgent || remote.getType() != OBJ_SEG || (mem != DRAM_SEG && mem != VRAM_SEG) ||
                count == 0 || count != static_cast<std::size_t>(local.descCount())) {
                throw std::invalid_argument("it is not between memory and as many objects of this agent");
            }
            std::vector<std::size_t> order(count);
            for (std::size_t index = 0; index < count; ++index) {
                order[index] = index;
            }
            const auto key = [&](std::size_t index) -> const std::string& {
                return static_cast<const Registered*>(remote[index].metadataP)->key;
            };
            // Objects stay in the order in which they first come.
            std::unordered_map<std::string_view, std::size_t> first;
            for (std::size_t index = 0; index < count; ++index) {
                first.try_emplace(key(index), index);
            }
            std::sort(order.begin(), order.end(), [&](std::size_t left, std::size_t right) {
                return std::make_tuple(first.at(key(left)), remote[left].addr) <
                       std::make_tuple(first.at(key(right)), remote[right].addr);
            });
            auto request = std::make_unique<Request>(operation);
            std::vector<hoistway_kv_piece> pieces;
            std::uint64_t end = 0;
            for (std::size_t place = 0; place < count; ++place) {
                const nixlMetaDesc &memory = local[order[place]], &object = remote[order[place]];
                if (memory.len != object.len || object.addr != end) {
                    throw std::invalid_argument("object " + key(order[place]) +
                                                ": its descriptors do not cover it from its start, without gaps");
                }
                pieces.push_back(piece_of(mem, memory));
                end += object.len;
                if (place + 1 == count || key(order[place + 1]) != key(order[place])) {
                    request->items.add(request->keys.emplace_back(key(order[place])), pieces);
                    pieces.clear();
                    end = 0;
                }
            }
            handle = request.release();
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t postXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                           const std::string&, nixlBackendReqH*& handle, const nixl_opt_b_args_t*) const override {
        return guarded("posting a transfer", [&] {
            auto* request = static_cast<Request*>(handle);
            if (request->ticket && progress(*request->ticket) == NIXL_IN_PROG) {
                return NIXL_ERR_REPOST_ACTIVE;
            }
            request->ticket.reset();
            request->ticket.emplace(request->operation == NIXL_READ ? opened_.blocks.load(request->items)
                                                                    : opened_.blocks.store(request->items));
            return NIXL_IN_PROG;
        });
    }

    nixl_status_t checkXfer(nixlBackendReqH* handle) const override {
        const auto* request = static_cast<const Request*>(handle);
        return request->ticket ? progress(*request->ticket) : NIXL_ERR_NOT_POSTED;
    }

    // Cancels what has not ended, and waits until nothing uses its memory.
    nixl_status_t releaseReqH(nixlBackendReqH* handle) const override {
        delete handle;
        return NIXL_SUCCESS;
    }

    nixl_status_t queryMem(const nixl_reg_dlist_t& objects, std::vector<nixl_query_resp_t>& answers) const override {
        return guarded("looking objects up", [&] {
            std::deque<std::string> names;
            std::vector<hoistway_kv_key> keys;
            for (int index = 0; index < objects.descCount(); ++index) {
                keys.push_back(kv::key(names.emplace_back(key_of(objects[index]))));
            }
            answers.clear();
            for (bool is_there : opened_.blocks.lookup(keys)) {
                answers.push_back(is_there ? nixl_query_resp_t(nixl_b_params_t()) : std::nullopt);
            }
            return NIXL_SUCCESS;
        });
    }

  private:
    // A transfer is in progress until its memory is the caller's again, also after a time-out.
    static nixl_status_t progress(const kv::Ticket& ticket) {
        const hoistway_status status = ticket.poll();
        if (status == HOISTWAY_PENDING || ticket.is_released()) {
            return status_of(status);
        }
        return guarded("waiting for memory", [&] {
            return ticket.wait_released(0) ? status_of(status) : NIXL_IN_PROG; // throws if that cannot be known
        });
    }

    Opened opened_;
};

nixlBackendEngine* create(const nixlBackendInitParams* params) {
    nixlBackendEngine* engine = nullptr;
    guarded("opening a store", [&] {
        // What NIXL is not that this was built for has its members elsewhere.
        if (params->type != PLUGIN_NAME || !params->customParams) {
            throw std::runtime_error("this plug-in was built for another version of NIXL");
        }
        engine = new Engine(params);
        return NIXL_SUCCESS;
    });
    return engine;
}

nixl_b_params_t parameters() {
    nixl_b_params_t names;
    for (const Text& text : TEXTS) {
        names[text.name] = "";
    }
    for (const Number& number : NUMBERS) {
        names[number.name] = "";
    }
    return names;
}

nixlBackendPlugin plugin = {
    NIXL_PLUGIN_API_VERSION,
    create,
    [](nixlBackendEngine* engine) { delete engine; },
    [] { return PLUGIN_NAME; },
    hoistway_version,
    parameters,
    Engine::mems,
};

} // namespace

extern "C" {
__attribute__((visibility("default"))) nixlBackendPlugin* nixl_plugin_init() { return &plugin; }
__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
