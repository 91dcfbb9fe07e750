/* SPDX-License-Identifier: MIT */
/* cli/cmd_doctor.c - what this machine has for unshard, and what is wrong with it. */
#include <stdarg.h>
#include <string.h>

#include "cli/doctor.h"
#include "cli/options.h"

static const char *const state_names[] = {
    [DOCTOR_FINE] = "ok", [DOCTOR_NOTE] = "note", [DOCTOR_PROBLEM] = "problem"};

void doctor_tell(struct doctor *d, enum doctor_state state, const char *what,
                 const char *hint, const char *fmt, ...)
{
    char text[1024];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    d->problems += state == DOCTOR_PROBLEM;
    if (d->c->opt.json) {
        printf("%s\n  {\"state\": \"%s\", \"what\": \"%s\", \"text\": ",
               d->told++ ? "," : "", state_names[state], what);
        out_json(stdout, text, strlen(text));
        fputs(", \"hint\": ", stdout);
        if (hint)
            out_json(stdout, hint, strlen(hint));
        else
            fputs("null", stdout);
        putchar('}');
        return;
    }
    if (state == DOCTOR_FINE && d->c->opt.quiet)
        return;
    printf("%-8s %-12s ", state_names[state], what);
    out_text(stdout, text, strlen(text), 0);
    if (hint)
        printf(" (%s)", hint);
    putchar('\n');
}

static void check_machine(struct doctor *d)
{
    doctor_fuse(d);
    doctor_cache(d);
    doctor_limits(d);
    doctor_confine(d);
    doctor_gpu(d);
}

static int run(struct cli *c)
{
    struct doctor d = {.c = c};

    if (c->opt.discard && !c->args)
        return options_wrong(c, &cmd_doctor,
                             "--discard takes the PATH of what is staged");
    if (c->opt.json)
        fputs("{\"schema\": 1, \"checks\": [", stdout);
    if (!c->opt.discard)
        check_machine(&d);
    for (int i = 0; i < c->args; i++)
        doctor_leftovers(&d, c->arg[i]);
    if (c->opt.json)
        printf("\n], \"problems\": %u}\n", d.problems);
    return d.problems ? STATUS_NO : STATUS_DONE;
}

const struct cli_command cmd_doctor = {
    .name = "doctor",
    .usage = "doctor [--discard] [PATH ...]",
    .summary = "FUSE, cache, limits, GPUs; what is staged at PATH",
    .min_args = 0,
    .max_args = 64,
    .takes = "x",
    .run = run,
};
