// Reading and checking of certificate files: Context and Credentials of tls.hpp.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <stdexcept>

#include "clock.hpp"
#include "net.hpp"
#include "tls.hpp"

namespace kvdir::tls {
namespace {

constexpr const char* kSuites = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

int no_password(char*, int, int, void*) { return 0; }  // or OpenSSL asks the terminal

[[noreturn]] void refuse(const char* setting, const std::string& path, const std::string& why) {
    throw std::runtime_error(std::string(setting) + ": " + path + " " + why);
}

void need_readable(const char* setting, const std::string& path) {
    if (access(path.c_str(), R_OK) != 0) refuse(setting, path, "cannot be read: " + error_text(errno));
}

std::string last_error(const openssl::Library& lib) {
    const char* const text = lib.ERR_reason_error_string(lib.ERR_peek_last_error());
    return text != nullptr ? text : "unknown error";
}

}  // namespace

Context::Context(const Files& files)
    : lib_(openssl::library()), context_((lib_.ERR_clear_error(), lib_.SSL_CTX_new(lib_.TLS_method()))) {
    if (!context_) throw std::runtime_error("OpenSSL does not start: " + last_error(lib_));
    configure();
    load(files);
    verify_own(files);
    std::tm ends{};
    if (lib_.ASN1_TIME_to_tm(lib_.X509_get0_notAfter(lib_.SSL_CTX_get0_certificate(get())), &ends) == 1)
        expires_unix_s_ = timegm(&ends);
}

void Context::configure() {
    lib_.SSL_CTX_ctrl(get(), openssl::kSetMinVersion, openssl::kTls13, nullptr);
    if (lib_.SSL_CTX_set_ciphersuites(get(), kSuites) != 1) throw std::runtime_error("OpenSSL has no TLS 1.3: " + last_error(lib_));
    lib_.SSL_CTX_set_num_tickets(get(), 0);
    lib_.SSL_CTX_ctrl(get(), openssl::kSetSessionCache, 0, nullptr);
    lib_.SSL_CTX_set_default_read_buffer_len(get(), kChunkBytes);
    lib_.SSL_CTX_ctrl(get(), openssl::kSetReadAhead, 1, nullptr);
    lib_.SSL_CTX_ctrl(get(), openssl::kSetMode, openssl::kModeReleaseBuffers, nullptr);
    lib_.SSL_CTX_set_default_passwd_cb(get(), no_password);
    lib_.SSL_CTX_set_verify(get(), openssl::kVerifyBoth, nullptr);
}

void Context::load(const Files& files) {
    need_readable("data_tls_cert", files.certificate);
    need_readable("data_tls_key", files.key);
    need_readable("data_tls_ca", files.ca);
    if (lib_.SSL_CTX_use_certificate_chain_file(get(), files.certificate.c_str()) != 1)
        refuse("data_tls_cert", files.certificate, "holds no PEM certificate: " + last_error(lib_));
    if (lib_.SSL_CTX_use_PrivateKey_file(get(), files.key.c_str(), openssl::kPem) != 1 || lib_.SSL_CTX_check_private_key(get()) != 1)
        refuse("data_tls_key", files.key,
               "is not the key (PEM, not encrypted) of the certificate in " + files.certificate + ": " + last_error(lib_));
    if (lib_.SSL_CTX_load_verify_locations(get(), files.ca.c_str(), nullptr) != 1)
        refuse("data_tls_ca", files.ca, "holds no PEM certificate of a CA: " + last_error(lib_));
}

// What peers would say of our certificate, said at start.
void Context::verify_own(const Files& files) {
    openssl::Chain* chain = nullptr;
    lib_.SSL_CTX_ctrl(get(), openssl::kGetChain, 0, &chain);
    for (const int purpose : {openssl::kPurposeServer, openssl::kPurposeClient}) {
        const std::unique_ptr<openssl::StoreContext, void (*)(openssl::StoreContext*)> check(lib_.X509_STORE_CTX_new(),
                                                                                             lib_.X509_STORE_CTX_free);
        if (!check || lib_.X509_STORE_CTX_init(check.get(), lib_.SSL_CTX_get_cert_store(get()),
                                              lib_.SSL_CTX_get0_certificate(get()), chain) != 1)
            throw std::bad_alloc();
        lib_.X509_STORE_CTX_set_purpose(check.get(), purpose);
        if (lib_.X509_verify_cert(check.get()) == 1) continue;
        const std::string why = lib_.X509_verify_cert_error_string(lib_.X509_STORE_CTX_get_error(check.get()));
        refuse("data_tls_cert", files.certificate,
               "would be refused by every peer: " + why + "; it must be valid now, signed by a CA in " + files.ca +
                   ", and allowed as TLS server and client");
    }
}

Credentials::Credentials(Files files, uint64_t look_ns)
    : files_(std::move(files)),
      look_ns_(look_ns),
      seen_(fingerprint_of_files()),
      context_(std::make_shared<Context>(files_)),
      looked_ns_(now_ns()) {}

std::string Credentials::fingerprint_of_files() const {
    std::string all;
    for (const std::string* path : {&files_.certificate, &files_.key, &files_.ca}) {
        struct stat found{};
        if (stat(path->c_str(), &found) != 0) found = {};
        for (const auto part : {uint64_t{found.st_dev}, uint64_t{found.st_ino}, static_cast<uint64_t>(found.st_size),
                                static_cast<uint64_t>(found.st_mtim.tv_sec), static_cast<uint64_t>(found.st_mtim.tv_nsec)})
            all += std::to_string(part) + ' ';
    }
    return all;
}

std::shared_ptr<const Context> Credentials::current() {
    const std::lock_guard<std::mutex> guard(mutex_);
    const uint64_t now = now_ns();
    if (now - looked_ns_ < look_ns_) return context_;
    looked_ns_ = now;
    std::string seen = fingerprint_of_files();  // before reading: a change in between is seen next time
    if (seen == seen_) return context_;
    try {
        context_ = std::make_shared<Context>(files_);
        seen_ = std::move(seen);
        failure_.clear();
        ++reloads_;
    } catch (const std::runtime_error& error) {
        failure_ = error.what();
        ++failed_reloads_;
    }
    return context_;
}

CredentialStats Credentials::stats() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return {reloads_, failed_reloads_, context_->expires_unix_s(), failure_};
}

}  // namespace kvdir::tls
