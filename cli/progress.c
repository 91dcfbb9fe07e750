/* SPDX-License-Identifier: MIT */
/* cli/progress.c - the line that tells how far it is. */
#include "cli/progress.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/thread.h"
#include "cli/cli.h"

enum {
    TICK_MS = 100,
    BAR_MIN = 8,
    BAR_MAX = 32,
    LINE_MAX_BYTES = 512,
};

static const double first_s = 0.4;  /* what is done by then needs no line */
static const double smooth_s = 3.0; /* the rate is that of about this time */

static double seconds_since(const struct timespec *from)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - from->tv_sec) +
           (double)(now.tv_nsec - from->tv_nsec) * 1e-9;
}

/* "7 s", "4:05", "2:04:05" */
static const char *duration(double seconds, char dst[32])
{
    unsigned long s = (unsigned long)MIN(seconds + 0.5, 359999.0);

    if (s < 60)
        snprintf(dst, 32, "%lu s", s);
    else if (s < 3600)
        snprintf(dst, 32, "%lu:%02lu", s / 60, s % 60);
    else
        snprintf(dst, 32, "%lu:%02lu:%02lu", s / 3600, s / 60 % 60, s % 60);
    return dst;
}

/* The rate of the last seconds: each look counts by the time since the one before. */
static void measure(struct progress *p, uint64_t done, double now)
{
    double since = now - p->when;
    uint64_t more = done - MIN(p->seen, done); /* another process may begin anew */
    double rate = since > 0 ? (double)more / since : 0;

    if (p->drawings == 0)
        p->rate = now > 0 ? (double)done / now : 0;
    else
        p->rate += (rate - p->rate) * (1 - exp(-since / smooth_s));
    p->seen = done;
    p->when = now;
}

/* Text that is put together for one line of the terminal. */
struct line {
    char text[LINE_MAX_BYTES];
    int len;
    int width;
};

static void add(struct line *l, const char *text)
{
    int n = snprintf(l->text + l->len, sizeof l->text - (size_t)l->len, "  %s", text);

    l->len = MIN(l->len + n, (int)sizeof l->text - 1);
    l->width += n;
}

/* What stands behind the bar; each level leaves out more. */
static void tell_numbers(const struct progress *p, uint64_t done, int level,
                         struct line *l)
{
    char size[16], total[16], rate[16], left[32], text[96];
    bool stalled = p->rate < 1;

    if (level < 1)
        snprintf(text, sizeof text, "%s of %s", out_size(done, size),
                 out_size(p->total, total));
    else
        snprintf(text, sizeof text, "%s", out_size(done, size));
    if (level < 2)
        add(l, text);
    snprintf(text, sizeof text, "%s/s", out_size((uint64_t)p->rate, rate));
    if (level < 3)
        add(l, text);
    if (done >= p->total)
        snprintf(text, sizeof text, "finishing");
    else if (stalled)
        snprintf(text, sizeof text, "? left");
    else
        snprintf(text, sizeof text, "%s left",
                 duration((double)(p->total - done) / p->rate, left));
    add(l, text);
}

static void draw_bar(const struct screen *s, int width, double part)
{
    int full = (int)(part * width);

    screen_style(s, stderr, STYLE_GOOD);
    for (int i = 0; i < full; i++)
        fputs(s->utf8 ? "━" : "#", stderr);
    screen_style(s, stderr, STYLE_NONE);
    screen_style(s, stderr, STYLE_FAINT);
    for (int i = full; i < width; i++)
        fputs(s->utf8 ? "─" : "-", stderr);
    screen_style(s, stderr, STYLE_NONE);
}

/* "verify step100   31%  ━━━━━━────────  1.23 GiB of 4.00 GiB  410 MiB/s  7 s left" */
static void draw_part(const struct progress *p, uint64_t done, int room)
{
    double part = (double)MIN(done, p->total) / (double)p->total;
    int name = MIN(screen_width(&p->screen, p->what, strlen(p->what)), room / 3);
    struct line l;
    int bar = 0, level = -1;

    do {
        l = (struct line){0};
        tell_numbers(p, done, ++level, &l);
        bar = room - name - 6 - 2 - l.width;
    } while (level < 3 && bar < (level < 2 ? BAR_MIN : 0));
    screen_text_cut(&p->screen, stderr, p->what, strlen(p->what), name);
    fprintf(stderr, "  %3d%%", (int)(100 * part));
    if (bar >= BAR_MIN) {
        fputs("  ", stderr);
        draw_bar(&p->screen, MIN(bar, (int)BAR_MAX), part);
    }
    if (bar >= 0)
        fputs(l.text, stderr);
}

/* "scan run7  ⠙  12 s" */
static void draw_unknown(const struct progress *p, uint64_t done, double now, int room)
{
    static const char *const braille[] = {"⠋", "⠙", "⠹", "⠸", "⠼",
                                          "⠴", "⠦", "⠧", "⠇", "⠏"};
    static const char ascii[] = "|/-\\";
    char time[32], size[16], text[64];
    int name;

    if (done)
        snprintf(text, sizeof text, "  %s  %s/s  %s", out_size(done, size),
                 out_size((uint64_t)p->rate, (char[16]){0}), duration(now, time));
    else
        snprintf(text, sizeof text, "  %s", duration(now, time));
    name = MAX(room - (int)strlen(text) - 3, 0);
    screen_text_cut(&p->screen, stderr, p->what, strlen(p->what), name);
    if (p->screen.utf8)
        fprintf(stderr, "  %s%s", braille[p->drawings % ARRAY_SIZE(braille)], text);
    else
        fprintf(stderr, "  %c%s", ascii[p->drawings % strlen(ascii)], text);
}

/* With the lock. The last column stays free: some terminals wrap behind it. */
static void draw(struct progress *p)
{
    double now = seconds_since(&p->start);
    uint64_t done;

    if (now < first_s)
        return;
    if (p->look)
        p->look(p->look_user, p);
    done = atomic_load_explicit(&p->done, memory_order_relaxed);
    measure(p, done, now);
    screen_resize(&p->screen, STDERR_FILENO);
    flockfile(stderr);
    fputs("\r", stderr);
    if (p->total)
        draw_part(p, done, p->screen.columns - 1);
    else
        draw_unknown(p, done, now, p->screen.columns - 1);
    fputs("\033[K", stderr);
    fflush(stderr);
    funlockfile(stderr);
    p->drawings++;
    p->drawn = true;
}

static void erase(struct progress *p)
{
    if (p->drawn)
        fputs("\r\033[K", stderr);
    fflush(stderr);
    p->drawn = false;
}

static void *draw_until_the_end(void *user)
{
    struct progress *p = user;
    struct timespec until;

    pthread_mutex_lock(&p->lock);
    while (!p->ended) {
        draw(p);
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += TICK_MS * 1000000l;
        if (until.tv_nsec >= 1000000000l) {
            until.tv_nsec -= 1000000000l;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&p->wake, &p->lock, &until);
    }
    erase(p);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* False: no thread is to be had, and nothing is shown. */
static bool start(struct progress *p)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (thread_start(&p->thread, draw_until_the_end, p) == 0)
        return true;
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    return false;
}

void progress_begin(struct progress *p, const struct cli *c, const char *what,
                    const char *name, uint64_t total)
{
    *p = (struct progress){.look = p->look, .look_user = p->look_user, .total = total};
    if (c->opt.quiet || !isatty(STDERR_FILENO) || (c->opt.json && c->screen.people))
        return; /* rows of JSON are not kept off the line */
    /* No colour and no line for those who chose none; `always` is about the output. */
    screen_open(&p->screen, STDERR_FILENO,
                c->opt.colour == COLOUR_NEVER ? COLOUR_NEVER : COLOUR_AUTO);
    snprintf(p->what, sizeof p->what, "%s%s%s", what, name ? " " : "",
             name ? name : "");
    clock_gettime(CLOCK_MONOTONIC, &p->start);
    p->on = p->screen.people && start(p);
}

void progress_add(struct progress *p, uint64_t bytes)
{
    atomic_fetch_add_explicit(&p->done, bytes, memory_order_relaxed);
}

void progress_hide(struct progress *p)
{
    if (!p->on)
        return;
    pthread_mutex_lock(&p->lock);
    erase(p);
}

void progress_show(struct progress *p)
{
    if (!p->on)
        return;
    fflush(stdout); /* before the next drawing */
    pthread_mutex_unlock(&p->lock);
}

void progress_end(struct progress *p)
{
    if (!p->on)
        return;
    pthread_mutex_lock(&p->lock);
    p->ended = true;
    pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    p->on = false;
}
