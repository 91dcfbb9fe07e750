/* SPDX-License-Identifier: MIT */
/* gpu/driver.c - opens the CUDA driver and finds its functions. */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"

/* dlsym(3): an object pointer is stored through the function pointer's address. */
static bool find_function(void *library, const char *symbol, void *function)
{
    void *found = dlsym(library, symbol);

    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static const char *find_functions(struct driver *d)
{
#define X(name, symbol, parameters)                                                    \
    if (!find_function(d->library, symbol, &d->name))                                  \
        return symbol;
    DRIVER_FUNCTIONS(X)
#undef X
    d->shares = true;
#define X(name, symbol, parameters)                                                    \
    d->shares &= find_function(d->library, symbol, &d->name);
    DRIVER_SHARING_FUNCTIONS(X)
#undef X
    return NULL;
}

int driver_open(const char *path, struct driver *out, struct err *e)
{
    const char *missing, *file = path ? path : "libcuda.so.1";
    int result;

    *out = (struct driver){0};
    /* The driver leaves threads and handlers behind: it is not unloaded. */
    out->library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!out->library) {
        err_set(e, ENODEV, "no CUDA driver: %s", dlerror());
        return err_hint(e, "use the CPU, or install the driver of the NVIDIA device");
    }
    missing = find_functions(out);
    if (missing) {
        err_set(e, ENODEV, "%s has no %s", file, missing);
        driver_close(out);
        return err_hint(e, "a driver of CUDA 11.4 or later is needed");
    }
    result = out->init(0);
    if (result) {
        driver_result(out, result, driver_symbol_init, e);
        driver_close(out);
        e->code = ENODEV; /* whatever it is, there is no device to be had */
        return -ENODEV;
    }
    return 0;
}

void driver_close(struct driver *d)
{
    if (d->library)
        dlclose(d->library);
    d->library = NULL;
}

int driver_result(const struct driver *d, int result, const char *what, struct err *e)
{
    const char *name = NULL;
    int code = result == DRIVER_OUT_OF_MEMORY   ? ENOMEM
               : result == DRIVER_NOT_SUPPORTED ? ENOTSUP
                                                : EIO;

    if (!result)
        return 0;
    if (d->error_name(result, &name) || !name)
        name = "an error that it has no name for";
    return err_set(e, code, "%s: %s (%d)", what, name, result);
}
