#include "openssl.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace kvdir::openssl {
namespace {

constexpr unsigned long kOldest = 0x30000000UL;  // 3.0.0

[[noreturn]] void refuse(const std::string& why) {
    throw std::runtime_error(
        "TLS on the tcp plane needs OpenSSL 3 (libssl.so.3 and libcrypto.so.3) on this machine: install libssl3 (Debian, Ubuntu) "
        "or openssl-libs (Fedora, RHEL), or leave the data_tls_ settings empty: " +
        why);
}

void* open_library(const char* name) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) refuse(dlerror());
    return handle;
}

void* find(void* handle, const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr) refuse(std::string("it has no function ") + name);
    return symbol;
}

}  // namespace

Library load(const char* ssl_name, const char* crypto_name) {
    void* const crypto = open_library(crypto_name);
    void* const ssl = open_library(ssl_name);
    Library found;
#define KVDIR_FIND_IN(handle, name) found.name = reinterpret_cast<decltype(found.name)>(find(handle, #name));
#define KVDIR_FIND_SSL(result, name, parameters) KVDIR_FIND_IN(ssl, name)
#define KVDIR_FIND_CRYPTO(result, name, parameters) KVDIR_FIND_IN(crypto, name)
    KVDIR_LIBSSL_FUNCTIONS(KVDIR_FIND_SSL)
    KVDIR_LIBCRYPTO_FUNCTIONS(KVDIR_FIND_CRYPTO)
#undef KVDIR_FIND_SSL
#undef KVDIR_FIND_CRYPTO
#undef KVDIR_FIND_IN
    if (found.OpenSSL_version_num() < kOldest) refuse("the one found is older");
    return found;
}

const Library& library() {
    static const Library loaded = load(kSslName, kCryptoName);
    return loaded;
}

}  // namespace kvdir::openssl
