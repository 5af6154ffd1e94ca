/* Times MPI_Allreduce.
 *
 *     mpicc -O2 -o mpi_allreduce mpi_allreduce.c
 *     mpirun -n 2 ./mpi_allreduce --bytes 1000000 --mode dense
 *
 * dense    in-place sum of one array without zeros
 * small    dense, with the defaults of a small array: few bytes, many iterations
 *
 * Before every iteration the input is filled again and all ranks meet at a barrier; neither is
 * timed. The first iteration of a case is never timed: its result is compared with the exact sum.
 *
 * Only rank 0 reads and writes. Without --interactive it prints one JSON line at the end. With it,
 * it prints a "ready" line and then obeys the lines of its standard input: `go`, `set {...}` and
 * `quit`. README.md beside this file states the whole contract.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PERIOD = 7, NAME_BYTES = 16, LINE_BYTES = 4096, COMMAND_TAG = 1 };
enum { STATUS_FAILED = 1, STATUS_BAD_CASE = 2 };

static const long IDLE_POLL_NS = 5 * 1000 * 1000;
static const int64_t UNSET = INT64_MIN;

struct test_case {
    int64_t bytes;
    int64_t warmup;
    int64_t seed;
    char mode[NAME_BYTES];
    char dtype[NAME_BYTES];
};

enum verb { VERB_GO, VERB_SET, VERB_QUIT };

/* A command, which rank 0 sends to all ranks as raw bytes, because all run the same program. */
struct command {
    enum verb verb;
    struct test_case args;
};

struct options {
    struct test_case args;
    int64_t iterations;
    bool interactive;
};

/* A prepared case: the original input, and the array that the all-reduce overwrites. */
struct operation {
    struct test_case args;
    MPI_Datatype datatype;
    int64_t element_bytes;
    int elements;
    void *original;
    void *array;
};

struct span {
    int64_t start_ns;
    int64_t end_ns;
};

static int rank;
static int world;

/* ---- Failures ---- */

/* Prints a sentence at rank 0 and ends this rank. All ranks see the same bad case and call this, so
 * MPI_Finalize returns at every rank. */
static void leave(int status, const char *format, ...)
{
    if (rank == 0) {
        char reason[LINE_BYTES];
        va_list values;
        va_start(values, format);
        vsnprintf(reason, sizeof reason, format, values);
        va_end(values);
        printf("{\"peer\": \"openmpi\", \"rank\": 0, \"error\": \"%s\"}\n", reason);
        fflush(stdout);
        fprintf(stderr, "mpi_allreduce: %s\n", reason);
    }
    MPI_Finalize();
    exit(status);
}

/* Ends all ranks immediately, because only this rank knows of the failure. */
static void abort_all(int status, const char *reason)
{
    printf("{\"peer\": \"openmpi\", \"rank\": %d, \"error\": \"%s\"}\n", rank, reason);
    fflush(stdout);
    fprintf(stderr, "mpi_allreduce: rank %d: %s\n", rank, reason);
    MPI_Abort(MPI_COMM_WORLD, status);
    exit(status);
}

/* ---- The case and its data ---- */

/* Returns the size of an element and sets its type, or returns 0 for an unknown name. */
static int64_t find_type(const char *dtype, MPI_Datatype *datatype)
{
    if (strcmp(dtype, "f32") == 0) {
        *datatype = MPI_FLOAT;
        return 4;
    }
    if (strcmp(dtype, "f64") == 0) {
        *datatype = MPI_DOUBLE;
        return 8;
    }
    if (strcmp(dtype, "i32") == 0) {
        *datatype = MPI_INT32_T;
        return 4;
    }
    if (strcmp(dtype, "i64") == 0) {
        *datatype = MPI_INT64_T;
        return 8;
    }
    return 0;
}

/* Returns the reason why a case cannot be measured, or NULL if it can. */
static const char *fault_of(const struct test_case *args)
{
    MPI_Datatype datatype;
    int64_t element_bytes = find_type(args->dtype, &datatype);
    if (strcmp(args->mode, "sparse") == 0)
        return "MPI has no sparse all-reduce: mode must be dense or small.";
    if (strcmp(args->mode, "dense") != 0 && strcmp(args->mode, "small") != 0)
        return "mode must be dense or small.";
    if (element_bytes == 0)
        return "dtype must be one of f32, f64, i32, i64.";
    if (args->bytes <= 0)
        return "bytes must be more than 0.";
    if (args->bytes % element_bytes != 0)
        return "bytes must be a whole number of elements.";
    if (args->bytes / element_bytes > INT_MAX)
        return "MPI counts at most 2147483647 elements.";
    if (args->warmup < 1)
        return "warmup must be at least 1.";
    if (args->seed < 0 || args->seed > UINT32_MAX)
        return "seed must be from 0 to 4294967295.";
    return NULL;
}

/* Returns a rank's element at an index: a whole number from 1 to 7, so that sums are exact. */
static int64_t value(const struct test_case *args, int64_t of_rank, int64_t index)
{
    return 1 + (index + 3 * of_rank + args->seed) % PERIOD;
}

/* Returns the number at an index of an array of the operation's type. */
static double read_element(const struct operation *op, const void *array, int64_t index)
{
    if (op->datatype == MPI_FLOAT)
        return ((const float *)array)[index];
    if (op->datatype == MPI_DOUBLE)
        return ((const double *)array)[index];
    if (op->datatype == MPI_INT32_T)
        return ((const int32_t *)array)[index];
    return (double)((const int64_t *)array)[index];
}

static void write_element(const struct operation *op, void *array, int64_t index, int64_t number)
{
    if (op->datatype == MPI_FLOAT)
        ((float *)array)[index] = (float)number;
    else if (op->datatype == MPI_DOUBLE)
        ((double *)array)[index] = (double)number;
    else if (op->datatype == MPI_INT32_T)
        ((int32_t *)array)[index] = (int32_t)number;
    else
        ((int64_t *)array)[index] = number;
}

/* ---- The operation ---- */

static struct span measure(struct operation *op);

static bool is_correct(const struct operation *op)
{
    int64_t expected[PERIOD] = {0};
    for (int i = 0; i < PERIOD; i++)
        for (int r = 0; r < world; r++)
            expected[i] += value(&op->args, r, i);
    for (int64_t i = 0; i < op->elements; i++)
        if (read_element(op, op->array, i) != (double)expected[i % PERIOD])
            return false;
    return true;
}

/* Builds a case, checks its first iteration and runs the rest of the warm-up. */
static struct operation prepare(const struct test_case *args)
{
    struct operation op = {.args = *args};
    op.element_bytes = find_type(args->dtype, &op.datatype);
    op.elements = (int)(args->bytes / op.element_bytes);
    op.original = malloc((size_t)args->bytes);
    op.array = malloc((size_t)args->bytes);
    if (op.original == NULL || op.array == NULL)
        abort_all(STATUS_FAILED, "there is not enough memory.");
    for (int64_t i = 0; i < op.elements; i++)
        write_element(&op, op.original, i, value(args, rank, i));
    measure(&op);
    if (!is_correct(&op))
        abort_all(STATUS_FAILED, "the first all-reduce did not return the sum.");
    for (int64_t i = 1; i < args->warmup; i++)
        measure(&op);
    return op;
}

static void discard(struct operation *op)
{
    free(op->original);
    free(op->array);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Runs one iteration. MPI's default error handler ends all ranks if it fails. */
static struct span measure(struct operation *op)
{
    struct span span;
    memcpy(op->array, op->original, (size_t)op->args.bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    span.start_ns = now_ns();
    MPI_Allreduce(MPI_IN_PLACE, op->array, op->elements, op->datatype, MPI_SUM, MPI_COMM_WORLD);
    span.end_ns = now_ns();
    return span;
}

/* Returns the longest time of any rank, in us. The result is valid only at rank 0. */
static double slowest_us(struct span span)
{
    int64_t mine_ns = span.end_ns - span.start_ns;
    int64_t slowest_ns = 0;
    MPI_Reduce(&mine_ns, &slowest_ns, 1, MPI_INT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
    return (double)slowest_ns / 1000.0;
}

/* Returns the span from the first rank's start to the last rank's end. The result is valid only at
 * rank 0, and only if all ranks share one monotonic clock. */
static struct span widest(struct span span)
{
    struct span all = {0, 0};
    MPI_Reduce(&span.start_ns, &all.start_ns, 1, MPI_INT64_T, MPI_MIN, 0, MPI_COMM_WORLD);
    MPI_Reduce(&span.end_ns, &all.end_ns, 1, MPI_INT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
    return all;
}

/* ---- Output ---- */

/* Prints the keys that all long lines share, without the braces. */
static void print_facts(const struct test_case *args)
{
    const char *btl = getenv("OMPI_MCA_btl");
    printf("\"peer\": \"openmpi\", \"rank\": 0, \"world\": %d, \"btl\": \"%s\", ", world,
           btl == NULL ? "default" : btl);
    printf("\"bytes\": %" PRId64 ", \"mode\": \"%s\", \"dtype\": \"%s\", \"density\": 1.0, ",
           args->bytes, args->mode, args->dtype);
    printf("\"warmup\": %" PRId64 ", \"seed\": %" PRId64 ", ", args->warmup, args->seed);
}

static struct operation prepare_and_report_ready(const struct test_case *args)
{
    struct operation op = prepare(args);
    if (rank == 0) {
        printf("{\"ready\": true, ");
        print_facts(args);
        printf("\"checked\": true}\n");
        fflush(stdout);
    }
    return op;
}

/* ---- Running once ---- */

static void run_once(const struct options *options)
{
    struct operation op = prepare(&options->args);
    double *times_us = calloc((size_t)options->iterations, sizeof *times_us);
    if (times_us == NULL)
        abort_all(STATUS_FAILED, "there is not enough memory.");
    for (int64_t i = 0; i < options->iterations; i++)
        times_us[i] = slowest_us(measure(&op));
    if (rank == 0) {
        printf("{");
        print_facts(&options->args);
        printf("\"times_us\": [");
        for (int64_t i = 0; i < options->iterations; i++)
            printf("%s%.3f", i == 0 ? "" : ", ", times_us[i]);
        printf("], \"checked\": true}\n");
        fflush(stdout);
    }
    free(times_us);
    discard(&op);
}

/* ---- Commands ---- */

static const char *skip_spaces(const char *text)
{
    return text + strspn(text, " \t\r\n");
}

/* Reads a JSON string without escapes; returns the text after the string, or NULL. */
static const char *read_string(const char *text, char *out, size_t out_bytes)
{
    if (*text != '"')
        return NULL;
    size_t length = strcspn(text + 1, "\"\\");
    if (text[1 + length] != '"' || length >= out_bytes)
        return NULL;
    memcpy(out, text + 1, length);
    out[length] = '\0';
    return text + length + 2;
}

/* Reads a JSON number that must be whole; returns the text after the number, or NULL. */
static const char *read_whole(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    bool fraction = *end == '.' || *end == 'e' || *end == 'E';
    if (end == text || errno != 0 || fraction)
        return NULL;
    *out = number;
    return end;
}

/* Skips a number or a string that does not concern MPI; returns the text after it, or NULL. */
static const char *skip_value(const char *text)
{
    char ignored[LINE_BYTES];
    if (*text == '"')
        return read_string(text, ignored, sizeof ignored);
    char *end;
    strtod(text, &end);
    return end == text ? NULL : end;
}

/* Reads the value of one key into a case; returns the text after the value, or NULL. */
static const char *read_value(const char *key, const char *text, struct test_case *args)
{
    if (strcmp(key, "bytes") == 0)
        return read_whole(text, &args->bytes);
    if (strcmp(key, "warmup") == 0)
        return read_whole(text, &args->warmup);
    if (strcmp(key, "seed") == 0)
        return read_whole(text, &args->seed);
    if (strcmp(key, "mode") == 0)
        return read_string(text, args->mode, sizeof args->mode);
    if (strcmp(key, "dtype") == 0)
        return read_string(text, args->dtype, sizeof args->dtype);
    if (strcmp(key, "density") == 0 || strcmp(key, "overlap") == 0 || strcmp(key, "block") == 0)
        return skip_value(text);
    return NULL;
}

/* Applies a flat JSON object to a case; returns whether the whole text is such an object. */
static bool read_object(const char *text, struct test_case *args)
{
    text = skip_spaces(text);
    if (*text++ != '{')
        return false;
    text = skip_spaces(text);
    if (*text == '}')
        return *skip_spaces(text + 1) == '\0';
    for (;;) {
        char key[NAME_BYTES];
        text = read_string(skip_spaces(text), key, sizeof key);
        if (text == NULL || *(text = skip_spaces(text)) != ':')
            return false;
        text = read_value(key, skip_spaces(text + 1), args);
        if (text == NULL)
            return false;
        text = skip_spaces(text);
        if (*text == '}')
            return *skip_spaces(text + 1) == '\0';
        if (*text++ != ',')
            return false;
    }
}

/* Reads lines until one is a command; the end of the input counts as `quit`. */
static struct command read_command(const struct test_case *args)
{
    struct command command = {.verb = VERB_QUIT, .args = *args};
    char line[LINE_BYTES];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\r\n")] = '\0';
        if (*skip_spaces(line) == '\0')
            continue;
        if (strcmp(line, "quit") == 0)
            return command;
        if (strcmp(line, "go") == 0) {
            command.verb = VERB_GO;
            return command;
        }
        if (strncmp(line, "set ", 4) != 0)
            abort_all(STATUS_BAD_CASE, "unknown command; use go, set {...} or quit.");
        if (!read_object(line + 4, &command.args))
            abort_all(STATUS_BAD_CASE, "set needs a flat JSON object with known keys.");
        command.verb = VERB_SET;
        return command;
    }
    return command;
}

/* Returns the next command, which rank 0 reads and sends to the other ranks. They sleep between
 * polls: a blocking receive would spin, and take cores from the other programs of the race. */
static struct command next_command(const struct test_case *args)
{
    struct command command;
    if (rank == 0) {
        command = read_command(args);
        for (int other = 1; other < world; other++)
            MPI_Send(&command, sizeof command, MPI_BYTE, other, COMMAND_TAG, MPI_COMM_WORLD);
        return command;
    }
    const struct timespec pause = {.tv_nsec = IDLE_POLL_NS};
    int arrived = 0;
    while (MPI_Iprobe(0, COMMAND_TAG, MPI_COMM_WORLD, &arrived, MPI_STATUS_IGNORE), !arrived)
        nanosleep(&pause, NULL);
    MPI_Recv(&command, sizeof command, MPI_BYTE, 0, COMMAND_TAG, MPI_COMM_WORLD,
             MPI_STATUS_IGNORE);
    return command;
}

static void go(struct operation *op)
{
    struct span span = measure(op);
    double us = slowest_us(span);
    struct span all = widest(span);
    if (rank == 0) {
        printf("{\"us\": %.3f, \"start_ns\": %" PRId64 ", \"end_ns\": %" PRId64 "}\n", us,
               all.start_ns, all.end_ns);
        fflush(stdout);
    }
}

static void run_interactive(const struct options *options)
{
    struct operation op = prepare_and_report_ready(&options->args);
    for (;;) {
        struct command command = next_command(&op.args);
        if (command.verb == VERB_GO) {
            go(&op);
            continue;
        }
        discard(&op);
        if (command.verb == VERB_QUIT)
            return;
        const char *fault = fault_of(&command.args);
        if (fault != NULL)
            leave(STATUS_BAD_CASE, "%s", fault);
        op = prepare_and_report_ready(&command.args);
    }
}

/* ---- The command line ---- */

static int64_t whole_option(const char *name, const char *text)
{
    int64_t number = 0;
    const char *end = read_whole(text, &number);
    if (end == NULL || *end != '\0')
        leave(STATUS_BAD_CASE, "%s needs a whole number.", name);
    return number;
}

static void name_option(const char *name, const char *text, char out[NAME_BYTES])
{
    if (strlen(text) >= NAME_BYTES)
        leave(STATUS_BAD_CASE, "%s has an unknown value.", name);
    strcpy(out, text);
}

static struct options parse_options(int argc, char **argv)
{
    struct options options = {
        .args = {.bytes = UNSET, .warmup = 2, .seed = 1, .mode = "dense", .dtype = "f32"},
        .iterations = UNSET,
    };
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--interactive") == 0) {
            options.interactive = true;
            continue;
        }
        if (i + 1 == argc)
            leave(STATUS_BAD_CASE, "%s is not an option, or its value is missing.", name);
        const char *text = argv[++i];
        if (strcmp(name, "--bytes") == 0)
            options.args.bytes = whole_option(name, text);
        else if (strcmp(name, "--iters") == 0)
            options.iterations = whole_option(name, text);
        else if (strcmp(name, "--warmup") == 0)
            options.args.warmup = whole_option(name, text);
        else if (strcmp(name, "--seed") == 0)
            options.args.seed = whole_option(name, text);
        else if (strcmp(name, "--mode") == 0)
            name_option(name, text, options.args.mode);
        else if (strcmp(name, "--dtype") == 0)
            name_option(name, text, options.args.dtype);
        else
            leave(STATUS_BAD_CASE, "%s is not an option.", name);
    }
    return options;
}

/* Fills in the defaults that depend on the mode, and rejects cases that cannot be measured. */
static void complete_options(struct options *options)
{
    bool small = strcmp(options->args.mode, "small") == 0;
    if (options->args.bytes == UNSET)
        options->args.bytes = small ? 4096 : 100000000;
    if (options->iterations == UNSET)
        options->iterations = small ? 200 : 10;
    if (options->iterations < 1)
        leave(STATUS_BAD_CASE, "--iters must be at least 1.");
    const char *fault = fault_of(&options->args);
    if (fault != NULL)
        leave(STATUS_BAD_CASE, "%s", fault);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    struct options options = parse_options(argc, argv);
    complete_options(&options);
    if (options.interactive)
        run_interactive(&options);
    else
        run_once(&options);
    MPI_Finalize();
    return 0;
}
