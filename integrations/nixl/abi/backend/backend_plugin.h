// What NIXL 1.5 and a plug-in of it call of each other, as far as plugin.cpp needs it: for machines without NIXL's own
// headers, such as those that have it from PyPI. Only layouts, and the order of virtual functions, matter here;
// test_nixl.py compares them with the plug-ins that NIXL comes with. Where NIXL's headers are, build.sh takes those.
#ifndef HOISTWAY_NIXL_ABI_H
#define HOISTWAY_NIXL_ABI_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define NIXL_PLUGIN_API_VERSION 1

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum class nixl_cost_t;
enum class nixl_thread_sync_t;
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_CANCELED = -11,
};

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using notif_list_t = std::vector<std::pair<std::string, std::string>>;
using nixlMemViewH = void*;
struct nixlAgentOptionalArgs;
struct nixlBackendOptionalArgs;
using nixl_opt_b_args_t = nixlBackendOptionalArgs;

class nixlBackendMD {
  public:
    explicit nixlBackendMD(bool is_private) : is_private_(is_private) {}
    virtual ~nixlBackendMD() = default;

  protected:
    bool is_private_;
};

class nixlBackendReqH {
  public:
    virtual ~nixlBackendReqH() = default;
};

struct nixlBasicDesc {
    std::uintptr_t addr;
    std::size_t len;
    std::uint64_t devId;
};
struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};
struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD* metadataP;
};
struct nixlRemoteMetaDesc : nixlMetaDesc {
    std::string remoteAgent;
};

// Made by NIXL, and only looked at here.
template <typename Desc> class nixlDescList {
  public:
    virtual ~nixlDescList() = default;
    nixl_mem_t getType() const { return type_; }
    int descCount() const { return static_cast<int>(descs_.size()); }
    const Desc& operator[](std::size_t index) const { return descs_[index]; }

  private:
    nixl_mem_t type_;
    std::vector<Desc> descs_;
};
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;
using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;

class nixlBackendInitParams {
  public:
    std::string localAgent;
    std::string type;
    nixl_b_params_t* customParams;
    bool enableProgTh;
    std::uint64_t pthrDelay;
    nixl_thread_sync_t syncMode;
    bool enableTelemetry_;
};

class nixlBackendEngine {
    // What NIXL reads of an engine, at these places.
    std::string type_;
    nixl_b_params_t params_;
    std::vector<std::uint64_t> telemetry_;
    std::mutex telemetry_mutex_;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool has_telemetry_;

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams* params)
        : type_(params->type), params_(*params->customParams), localAgent(params->localAgent),
          has_telemetry_(params->enableTelemetry_) {}
    nixlBackendEngine(const nixlBackendEngine&) = delete;
    void operator=(const nixlBackendEngine&) = delete;
    virtual ~nixlBackendEngine() = default;

    // In the order of NIXL 1.5.
    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc&, const nixl_mem_t&, nixlBackendMD*&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD*) = 0;
    virtual nixl_status_t connect(const std::string&) = 0;
    virtual nixl_status_t disconnect(const std::string&) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD*) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                                   const std::string&, nixlBackendReqH*&, const nixl_opt_b_args_t*) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                                   const std::string&, nixlBackendReqH*&, const nixl_opt_b_args_t*) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH*) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH*) const = 0;
    virtual nixl_status_t prepMemView(const nixl_remote_meta_dlist_t&, nixlMemViewH&, const nixl_opt_b_args_t*) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t&, nixlMemViewH&, const nixl_opt_b_args_t*) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD*, std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string&, const std::string&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc&, const nixl_mem_t&, const std::string&, nixlBackendMD*&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD*, nixlBackendMD*&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(notif_list_t&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string&, const std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t&, std::vector<nixl_query_resp_t>&) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                                           const std::string&, nixlBackendReqH* const&, std::chrono::microseconds&,
                                           std::chrono::microseconds&, nixl_cost_t&,
                                           const nixlAgentOptionalArgs*) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
};

class nixlBackendPlugin {
  public:
    int api_version;
    nixlBackendEngine* (*create_engine)(const nixlBackendInitParams*);
    void (*destroy_engine)(nixlBackendEngine*);
    const char* (*get_plugin_name)();
    const char* (*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

#endif
